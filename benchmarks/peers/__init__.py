"""Other loaders: what each is told by its own documentation, and the pinned environment that it runs in."""
