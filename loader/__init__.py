"""Samples and batches: manifest, plan, reading, decoding, the loader itself."""
