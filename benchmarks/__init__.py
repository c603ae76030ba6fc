"""Throughput measurements of the loader, alone and against its peers."""
