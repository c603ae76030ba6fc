"""Checks of a distributed model: refusals by name of what engines and shards would silently get wrong."""
