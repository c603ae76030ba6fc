"""``python -m penstock.cli`` is ``penstock``."""

from . import main

main()
