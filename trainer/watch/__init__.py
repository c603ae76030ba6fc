"""Ranks that stall, die or are told to stop."""
