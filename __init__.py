"""penstock: sharded data from object storage to the accelerators, balanced over ranks, resumed exactly."""

__version__ = "0.1.0"
