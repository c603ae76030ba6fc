"""The examination of a machine: what it has, and what a run will miss there."""
