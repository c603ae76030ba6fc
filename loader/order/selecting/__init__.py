"""Select the samples of an epoch: all, a subset, or draws by weights."""
