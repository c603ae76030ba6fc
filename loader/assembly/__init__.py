"""From an order to batches: spans are planned ahead, and gathered, and their steps begun as batches."""
