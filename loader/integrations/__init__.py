"""Integrations: the loader inside the training loops of other frameworks, one file each."""

import lazy_loader

# The names and their homes are in __init__.pyi, for type checkers too; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
