"""Any value as its type and a short text: for tables in terminals and notebooks."""

from __future__ import annotations

import reprlib
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoding.images.kind import image_kind

if TYPE_CHECKING:
    from ..columns import AnyArray

TEXT_CHARS = 160
_SHOWN_NUMBERS = 12

_brief = reprlib.Repr()
_brief.maxlist = _brief.maxtuple = _brief.maxdict = _brief.maxset = 12
_brief.maxstring = _brief.maxother = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class FieldView:
    """A field of a sample: its name, its type, and its value as a line of text.

    ``in_batch``: its type in a batch of a loader with the defaults, where that was looked for.
    """

    name: str
    kind: str
    value: str
    in_batch: str = ""


def describe_value(value: Any, chars: int = TEXT_CHARS) -> tuple[str, str]:
    """Describe a value by kind and a line of at most ``chars`` characters; never raises, reads only what it shows."""
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
    """Describe an array, a tensor on any device, or a numpy scalar; of large ones only the first numbers are copied."""
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
    """Convert an array or tensor to an array; bfloat16 and the like, which numpy lacks, to float32."""
    if not hasattr(value, "detach"):
        return np.asarray(value)
    tensor = value.detach().cpu()
    return np.asarray(tensor.float() if tensor.is_floating_point() else tensor)


def clip(text: str, chars: int) -> str:
    """Clip to one line of at most ``chars`` characters; control characters are spelled out."""
    line = " ".join(text[: 2 * chars + 2].split())
    line = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
    is_whole = len(line) <= chars and len(text) <= 2 * chars + 2
    return line if is_whole else line[: chars - 1] + "…"


def shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS else line[: TEXT_CHARS - 1] + "…"


def describe_bytes(data: bytes) -> tuple[str, str]:
    """Describe bytes by their first ones: images with their sides, arrays with their shape, text as it is."""
    kind = image_kind(data)
    if kind == "png" and len(data) >= 24:
        width, height = struct.unpack(">II", data[16:24])
        return "PNG", f"{width} x {height} pixels, {len(data):,} bytes"
    if kind == "jpeg":
        sides = _jpeg_sides(data)
        return "JPEG", (f"{sides[0]} x {sides[1]} pixels, " if sides else "") + f"{len(data):,} bytes"
    if kind == "webp":
        return "WebP", f"{len(data):,} bytes"
    if data[:6] == b"\x93NUMPY":
        header = data[10 : 10 + 118].split(b"\n")[0].decode("latin-1").strip()
        return "npy", shorten(header)
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return "bytes", f"{len(data):,} bytes: {data[:16].hex(' ')}" + (" …" if len(data) > 16 else "")
    if text.isprintable() or text.replace("\n", " ").replace("\t", " ").replace("\r", " ").isprintable():
        return "text", shorten(text)
    return "bytes", f"{len(data):,} bytes: {data[:16].hex(' ')}" + (" …" if len(data) > 16 else "")


def _jpeg_sides(data: bytes) -> tuple[int, int] | None:
    """Read width and height from the frame header (SOF0 to SOF15) of a JPEG (ITU T.81, B.2.2)."""
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack(">HH", data[at + 5 : at + 9])
            return width, height
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return None
