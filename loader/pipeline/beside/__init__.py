"""The pipeline in a process of its own, beside the training process, and the memory that both see."""
