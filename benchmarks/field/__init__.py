"""The field's benchmark: penstock beside all its peers, over workloads, stores and numbers of ranks."""
