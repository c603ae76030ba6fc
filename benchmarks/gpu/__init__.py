"""Loaders that feed a GPU: ``python -m penstock.benchmarks.gpu``, or ``make gpu``."""
