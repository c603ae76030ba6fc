"""Work on whole data sets: pack, verify, inspect, audit, plan and simulate."""

import lazy_loader

# The names and their homes are in __init__.pyi, for type checkers too; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
