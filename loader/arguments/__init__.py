"""What a loader accepts, checked and read before anything is opened."""
