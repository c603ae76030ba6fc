"""Which image format some bytes are in, told by how they begin."""

from __future__ import annotations

from typing import Literal

ImageKind = Literal["jpeg", "png", "webp"]

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_RIFF, _WEBP = b"RIFF", b"WEBP"  # four bytes of length lie between the two
_HEAD_BYTES = 12


def image_kind(data: bytes | memoryview) -> ImageKind | None:
    """The format that ``data`` begins as; None if it is none of these. Reads 12 bytes at most and decodes nothing."""
    head = bytes(data[:_HEAD_BYTES])
    if head.startswith(_JPEG):
        return "jpeg"
    if head.startswith(_PNG):
        return "png"
    if head.startswith(_RIFF) and head[8:] == _WEBP:
        return "webp"
    return None
