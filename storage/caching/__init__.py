"""A node's copy of what was read, on its disk."""
