"""Training on a Ray cluster: actors round the shards and the coordinator of a run, and the driver that starts them."""
