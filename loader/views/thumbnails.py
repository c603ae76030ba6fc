"""Small pictures of values that are images, as PNG in a data URI; written without any image library."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from ..decoding.images.kind import image_kind
from .describe import to_numpy

if TYPE_CHECKING:
    from ..columns import AnyArray

SIDE = 64
_LEAST_SIDE = 8  # arrays with shorter sides are vectors and small matrices
_MOST_PIXELS = 25_000_000  # of an encoded image that is decoded for a thumbnail


def thumbnail(value: Any) -> str | None:
    """Make a ``data:`` URI of at most about 17 kB for an image: an array, a tensor, or the bytes of a JPEG or PNG.

    Returns None where ``value`` is no image, or none that can be shown; never raises.
    """
    try:
        pixels = _decode(value) if isinstance(value, (bytes, memoryview)) else _sample(value)
        return None if pixels is None else f"data:image/png;base64,{base64.b64encode(_png(pixels)).decode()}"
    except Exception:  # noqa: BLE001 - what cannot be drawn is described by its text
        return None


def _decode(data: bytes | memoryview) -> AnyArray | None:
    kind = image_kind(data)
    if kind not in ("jpeg", "png"):
        return None
    if kind == "png":
        width, height = struct.unpack(">II", data[16:24])
        if width * height > _MOST_PIXELS:
            return None
    from ..decoding.images.images import ImageDecoder  # needs an extra, and torch is not needed without images

    return _sample(ImageDecoder(size=SIDE)(memoryview(data), None))


def _sample(value: Any) -> AnyArray | None:
    """Sample (h, w, 1 or 3) uint8 pixels, at most SIDE high and wide, by leaving out rows and columns."""
    shape = tuple(getattr(value, "shape", ()))
    if len(shape) == 2 and "uint8" in str(value.dtype):
        value, shape = value[None], (1, *shape)
    if len(shape) != 3:
        return None
    is_first = shape[0] in (1, 3, 4) and min(shape[1:]) >= _LEAST_SIDE
    if not is_first and not (shape[2] in (1, 3, 4) and min(shape[:2]) >= _LEAST_SIDE):
        return None
    height, width = shape[1:] if is_first else shape[:2]
    step = -(-max(height, width) // SIDE)
    pixels = to_numpy(value[:, ::step, ::step] if is_first else value[::step, ::step])
    if is_first:
        pixels = np.moveaxis(pixels, 0, -1)
    return _to_uint8(pixels[..., :3])


def _to_uint8(pixels: AnyArray) -> AnyArray:
    """Map pixels to uint8, which stays: 0 to 1 from black to white; others, as of normalised images, by their range."""
    if pixels.dtype == np.uint8:
        return pixels
    numbers = np.nan_to_num(pixels.astype(np.float64))
    low, high = float(numbers.min()), float(numbers.max())
    if low < 0 or high > 1:
        numbers = (numbers - low) / max(high - low, 1e-12)
    shown: AnyArray = (numbers * 255).astype(np.uint8)
    return shown


def _png(pixels: AnyArray) -> bytes:
    """Write a PNG of 8-bit grey or RGB pixels (ISO/IEC 15948), rows unfiltered."""
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)
    rows[:, 1:] = np.ascontiguousarray(pixels).reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, 2 if channels == 3 else 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows.tobytes(), 6)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data)) for name, data in parts
    )
