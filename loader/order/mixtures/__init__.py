"""Several orders as one: how many of each source, and which."""
