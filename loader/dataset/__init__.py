"""What a data set consists of: its shards, its manifest, and how that is found, built and kept."""
