"""penstock: sharded data from object storage to the accelerators, balanced over ranks, resumed exactly."""

import lazy_loader

__version__ = "0.1.0"

# The names and their homes are in __init__.pyi, for type checkers too; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
