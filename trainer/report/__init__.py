"""Reports of a run: observers, records, progress."""
