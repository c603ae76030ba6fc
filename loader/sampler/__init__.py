"""The sampler: the place of a run in its order, and its states."""
