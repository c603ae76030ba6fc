"""Checks of an image's header, before memory is taken for its pixels."""

from __future__ import annotations

import simplejpeg

from ...errors import DecodeError
from .jpeg_stream import jpeg_size
from .kind import image_kind

# A block of 8x8 pixels takes a bit of a JPEG at the least. A smaller JPEG fails when it is decoded.
_JPEG_PIXELS_PER_BYTE = 8 * 64
_SMALL_PIXELS = 1 << 24
# A header that claims more pixels than this counts as damage, or as an attack on the machine's memory.
MAX_PIXELS = 1 << 28

_UNUSUAL_SAMPLING = "subsampling level"


def read_header(data: bytes | memoryview) -> tuple[int, int, bool]:
    """Read height, width and whether simplejpeg can decode it; (0, 0, False) if it is not a JPEG.

    Raises:
        DecodeError: a JPEG's header is damaged, or claims too many pixels.
    """
    if image_kind(data) != "jpeg":
        return 0, 0, False
    colorspace: str | None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (KeyError, ValueError) as exc:
        # It knows no sampling but the usual ones. OpenCV, as PIL, decodes whatever libjpeg does.
        is_unknown = isinstance(exc, KeyError) or _UNUSUAL_SAMPLING in str(exc)
        size = jpeg_size(data) if is_unknown else None
        if size is None:
            why = "it states no size" if isinstance(exc, KeyError) else exc
            raise DecodeError(f"damaged JPEG header ({len(data)} bytes): {why}") from exc
        (height, width), colorspace = size, None
    check_pixels(height, width)
    if height * width > max(_SMALL_PIXELS, _JPEG_PIXELS_PER_BYTE * len(data)):
        raise DecodeError(f"damaged JPEG: it claims to be {width}x{height}, which {len(data)} bytes cannot hold")
    return height, width, colorspace in ("YCbCr", "Gray", "RGB")


def check_pixels(height: int, width: int) -> None:
    """Raise DecodeError for an image that is too large."""
    if height * width > MAX_PIXELS:
        raise DecodeError(
            f"the image claims to be {width}x{height}; no more than {MAX_PIXELS} pixels are decoded. "
            "Store it smaller, or give decode= a function of your own"
        )
