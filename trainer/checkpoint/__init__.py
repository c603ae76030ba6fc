"""Content of checkpoints, and how they are written, verified and restored."""
