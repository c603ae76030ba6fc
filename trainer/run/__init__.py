"""Decisions between steps: when to evaluate, save, rewind, stop."""
