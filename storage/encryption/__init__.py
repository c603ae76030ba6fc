"""Objects that are encrypted where they lie."""
