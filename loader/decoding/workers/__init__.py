"""Processes that decode and transform."""
