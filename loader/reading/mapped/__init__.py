"""Chunks of local files, mapped in place of read."""
