"""What a step trains on: batches of any iterable, on the rank's device, cut and shared."""
