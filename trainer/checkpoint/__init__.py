"""What a checkpoint holds, and how it is written, verified and restored."""
