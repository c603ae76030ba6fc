"""Worker processes that decode and transform."""
