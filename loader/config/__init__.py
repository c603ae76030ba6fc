"""The user's choices for a loader, checked before anything is opened."""
