"""Chunks of local files, mapped instead of read."""
