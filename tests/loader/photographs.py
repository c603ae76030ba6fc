"""Real photographs, found without importing the library that brings them: that takes every worker two seconds."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from PIL import Image


def photograph(name: str) -> Image.Image:
    """One of scikit-learn's sample images, "china.jpg" or "flower.jpg", as RGB."""
    library = find_spec("sklearn")
    assert library is not None, "install penstock[test]"
    assert library.origin is not None
    with Image.open(Path(library.origin).parent / "datasets" / "images" / name) as image:
        return image.convert("RGB")
