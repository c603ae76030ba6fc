"""Simulation of a job's ranks on machines that need not exist yet. Arithmetic alone, no I/O."""
