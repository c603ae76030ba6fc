"""From a chunk's name to an opened, checked block of columns."""
