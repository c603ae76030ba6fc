"""WebDataset's tar shards."""
