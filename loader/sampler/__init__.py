"""Where a run stands in its order, and how that is saved."""
