"""Ranks that share out the data: this process's rank, messages between ranks, and each one's part of a cut model."""
