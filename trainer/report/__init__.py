"""What a run tells: observers, records, progress."""
