"""Training steps: consumes any iterable of batches, checkpoints it and resumes it."""

import lazy_loader

# The names and their homes are in __init__.pyi, for type checkers too; each is imported when it is first used.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
