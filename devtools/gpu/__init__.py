"""Loaders that feed a GPU: ``python -m devtools gpu``, or ``make gpu``."""
