"""Passes over a loader, what they own, and what they are made of."""
