"""One step: its loss, gradients and update, and the microbatches that it is made of."""
