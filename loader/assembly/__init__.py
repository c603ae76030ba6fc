"""Assembly: from an order to batches. Spans are planned ahead and gathered, and their steps begun as batches."""
