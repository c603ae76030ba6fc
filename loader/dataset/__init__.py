"""Data sets: how their shards and manifests are found, built and kept."""
