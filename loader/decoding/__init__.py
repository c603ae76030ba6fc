"""From rows of opened chunks to a batch."""
