"""Checkpoints in an object store: streamed up in parts, valid by a manifest, fetched in parts, one run at a time."""
