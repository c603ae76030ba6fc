"""Shards of Arrow's family: Parquet and IPC files."""
