"""Memory: buffers that are used again, files that are mapped, and what the C library is asked for."""
