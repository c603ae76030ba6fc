"""Decoding: from rows of opened chunks to a batch."""
