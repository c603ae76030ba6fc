"""A bench that feeds damaged and made-up bytes to every parser, and keeps what breaks one."""
