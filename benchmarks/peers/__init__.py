"""Other loaders: the settings that their documentation advises, and the pinned environments that they run in."""
