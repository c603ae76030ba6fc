"""Streams that change shape: work on a lane's windows finds its outputs, and all ranks agree on them."""
