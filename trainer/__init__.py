"""Training steps: consumes any iterable of batches, checkpoints it and resumes it."""
