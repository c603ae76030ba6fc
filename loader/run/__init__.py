"""Passes over a loader: their parts, and the resources that they own."""
