"""Threads that no exit waits for, and waits that Ctrl-C may end at any point."""
