"""A value as its type and a short text, whatever it is: for tables in terminals and notebooks."""

from __future__ import annotations

import reprlib
from typing import Any

import numpy as np

from ..columns import AnyArray
from ..tools.inspect import describe_bytes

TEXT_CHARS = 160
_SHOWN_NUMBERS = 12

_brief = reprlib.Repr()
_brief.maxlist = _brief.maxtuple = _brief.maxdict = _brief.maxset = 12
_brief.maxstring = _brief.maxother = 80


def describe_value(value: Any, chars: int = TEXT_CHARS) -> tuple[str, str]:
    """The kind of a value and a line of at most ``chars`` characters; never raises, and reads no more than it shows."""
    try:
        kind, text = _describe(value, chars)
    except Exception as exc:  # noqa: BLE001 - a value of the user's may do anything
        return type(value).__name__, f"cannot be shown: {type(exc).__name__}"
    return kind, clip(text, chars)


def _describe(value: Any, chars: int) -> tuple[str, str]:
    if value is None:
        return "missing", ""
    if isinstance(value, (bytes, memoryview)):
        kind, text = describe_bytes(bytes(value))
        return kind, bytes(value)[: 4 * chars].decode(errors="replace") if kind == "text" else text
    if isinstance(value, str):
        return "str", value[: chars + 1]
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return _describe_array(value)
    return type(value).__name__, _brief.repr(value)


def _describe_array(value: Any) -> tuple[str, str]:
    """An array, a tensor on any device, or a scalar of numpy's: of large ones only the first numbers are copied."""
    shape = tuple(value.shape)
    kind = str(value.dtype).removeprefix("torch.") + (f" {list(shape)}" if shape else "")
    if 0 in shape:
        return kind, "[]"
    first = value[(0,) * (len(shape) - 1)][: _SHOWN_NUMBERS + 1] if shape else value
    numbers = to_numpy(first)
    if not shape:
        return kind, str(numbers[()])
    is_all = len(shape) == 1 and shape[0] <= _SHOWN_NUMBERS
    shown = np.array2string(numbers[:_SHOWN_NUMBERS], threshold=_SHOWN_NUMBERS + 1, max_line_width=1000)
    return kind, shown if is_all else f"{shown[:-1]} ...]"


def to_numpy(value: Any) -> AnyArray:
    """An array or tensor as an array; bfloat16 and its kind, which numpy lacks, as float32."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)


def clip(text: str, chars: int) -> str:
    """One line of at most ``chars`` characters; what a terminal would act on is spelled out."""
    line = " ".join(text[: 2 * chars + 2].split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    is_whole = len(line) <= chars and len(text) <= 2 * chars + 2
    return line if is_whole else line[: chars - 1] + "…"
