"""The batches that a step trains on: of any iterable, on the rank's device, cut and shared."""
