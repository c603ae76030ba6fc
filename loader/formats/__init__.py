"""Shard formats: what turns a chunk's bytes into columns."""
