"""What all rooms tell of themselves while they run: counts, traces, metrics, the process's use of its machine."""
