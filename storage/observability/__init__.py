"""Observability for all rooms: counts, traces, metrics, and the process's use of its machine."""
