"""The data sets that a loader reads: as users name them, and opened, always as a list of one or several."""
