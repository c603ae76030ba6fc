"""Throughput measurements of the loader, alone and against other loaders."""
