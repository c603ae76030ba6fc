"""Readers by a field's extension: of images, and of values that a function of bytes reads."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .arrays import read_npy, read_npz


def read_text(data: Any) -> str:
    """Read UTF-8 text; text of a column as it is, and other values as Python writes them."""
    return str(data, "utf-8") if isinstance(data, bytes | memoryview) else str(data)


def _read_int(data: memoryview) -> int:
    return int(bytes(data))


def _read_json(data: memoryview) -> Any:
    return json.loads(bytes(data))


IMAGE_EXTENSIONS = frozenset(("jpg", "jpeg", "png", "webp"))
# Labels of files: numbers as text. A column that holds numbers says so by its type, whatever its name.
LABEL_EXTENSIONS = frozenset(("cls", "cls2", "index", "inx", "id"))
READERS: dict[str, Callable[[memoryview], Any]] = {
    **dict.fromkeys(sorted(LABEL_EXTENSIONS), _read_int),
    **dict.fromkeys(("json", "jsn"), _read_json),
    **dict.fromkeys(("txt", "text", "transcript"), read_text),
    "npy": read_npy,
    "npz": read_npz,
}
