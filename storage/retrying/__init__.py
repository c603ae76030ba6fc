"""Tried again until a deadline, asked twice where that is late, and no more at a time than a host bears."""
