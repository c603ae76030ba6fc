"""The parts of ``pack``: sources of samples, a function over them, writers of shards, and the target."""
