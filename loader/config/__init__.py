"""What users say of a loader, checked before anything is opened."""
