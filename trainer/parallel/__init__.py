"""One model on many ranks: sharding, precision, recomputation, averaging."""
