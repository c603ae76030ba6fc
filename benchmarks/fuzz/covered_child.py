"""The child of the engine "cover": atheris rewrites our parsers while they are imported, to see their lines."""

from __future__ import annotations

import sys

import atheris  # type: ignore[import-untyped, unused-ignore]

with atheris.instrument_imports(include=["penstock.loader", "penstock.storage"]):
    from . import child

if __name__ == "__main__":
    child.main(*sys.argv[1:])
