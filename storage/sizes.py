"""Sizes as people write them."""

from __future__ import annotations

import re

_UNITS = {"": 1} | {
    letter + i: base**power for power, letter in enumerate("kmgtp", 1) for i, base in (("", 1000), ("i", 1024))
}


def read_size(text: str) -> float | None:
    """Bytes of a text such as '512MiB', '2GB' or '1.5 GiB'; None if it is no size."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*((?:[kmgtp]i?)?)b?\s*", text.lower())
    return None if found is None else float(found[1]) * _UNITS[found[2]]
