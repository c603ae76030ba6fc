"""Which samples are in an epoch: all, a subset, or draws by weights."""
