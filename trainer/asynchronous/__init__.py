"""Training by workers that lease batches, push gradients to a parameter server, and pull weights at their own pace."""
