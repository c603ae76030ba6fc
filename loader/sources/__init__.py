"""The data sets of a loader, always a list of one or several: as users name them, and opened."""
