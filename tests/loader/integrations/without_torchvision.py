"""Runs a program as if torchvision were not installed, where it cannot be imported.

A wheel of it that does not fit torch's build is such a one, and transformers imports what it finds installed.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def hide() -> None:
    """Hide a torchvision that cannot be imported."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
        sys.modules["torchvision"] = None  # type: ignore[assignment]


if __name__ == "__main__":
    hide()
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
