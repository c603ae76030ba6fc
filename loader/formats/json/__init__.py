"""Shards of JSON lines."""
