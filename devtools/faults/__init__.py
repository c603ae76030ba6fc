"""Faults of networks and servers, made on purpose: a proxy that stands between a client and a real server."""
