"""What a JPEG says of itself before its pixels: whether a decoder for plain JPEGs on a device may be given it.

Markers are those of ITU-T T.81, table B.1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_START, _END, _SCAN = b"\xff\xd8", b"\xff\xd9", 0xDA
_PLAIN_FRAMES = (0xC0, 0xC1)  # baseline, and extended sequential with Huffman codes
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_EXIF_MARKER, _EXIF = 0xE1, b"Exif\0\0"
_ADOBE_MARKER, _ADOBE, _ADOBE_YCC = 0xEE, b"Adobe", 1
_MOST_SEGMENTS = 1024
_COLOURS = 3
# Of the luminance, relative to a chrominance of (1, 1): 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1.
_SAMPLINGS = frozenset(((1, 1), (2, 1), (1, 2), (2, 2), (4, 1)))


@dataclass(frozen=True, slots=True)
class PlainJpeg:
    """A whole JPEG of 8 bits, Huffman codes, one frame that is not progressive, and YCbCr in a usual subsampling.

    ``sampling`` is the luminance's (horizontal, vertical) factor, relative to a chrominance of (1, 1). ``exif`` is
    where its EXIF segments' names begin, which tell decoders to turn the image. ``one_scan``: all colours are in one.
    """

    height: int
    width: int
    sampling: tuple[int, int]
    exif: tuple[int, ...]
    one_scan: bool


def plain_jpeg(data: bytes | memoryview) -> PlainJpeg | None:
    """What the header says; None where it is no such JPEG, is cut short, or its segments do not follow each other."""
    try:
        return _walk(data)
    except (struct.error, IndexError):
        return None


def _walk(data: bytes | memoryview) -> PlainJpeg | None:
    if bytes(data[:2]) != _START or bytes(data[-2:]) != _END:
        return None
    at, frame, exif = 2, None, []
    for _ in range(_MOST_SEGMENTS):
        while data[at] == 0xFF and data[at + 1] == 0xFF:  # fill bytes
            at += 1
        lead, marker, length = struct.unpack_from(">BBH", data, at)
        if lead != 0xFF or length < 2 or at + 2 + length > len(data):
            return None
        begin = at + 4
        if marker == _SCAN:
            return None if frame is None else PlainJpeg(*frame, tuple(exif), data[begin] == _COLOURS)
        if marker in _FRAMES:
            frame = _read_frame(data, begin) if marker in _PLAIN_FRAMES and frame is None else None
            if frame is None:
                return None
        elif marker == _EXIF_MARKER and bytes(data[begin : begin + len(_EXIF)]) == _EXIF:
            exif.append(begin)
        elif marker == _ADOBE_MARKER and _is_other_colour(data, begin, length):
            return None
        at += 2 + length
    return None


def _read_frame(data: bytes | memoryview, at: int) -> tuple[int, int, tuple[int, int]] | None:
    """Height, width and sampling of a frame of three 8-bit components; the first alone is sampled more finely."""
    precision, height, width, components = struct.unpack_from(">BHHB", data, at)
    if precision != 8 or components != _COLOURS or not height or not width:
        return None
    names = bytes(data[at + 6 : at + 15 : 3])
    sampling = [divmod(data[at + 7 + 3 * number], 16) for number in range(3)]
    is_usual = sampling[0] in _SAMPLINGS and sampling[1] == sampling[2] == (1, 1)
    return (height, width, sampling[0]) if is_usual and names != b"RGB" else None


def _is_other_colour(data: bytes | memoryview, at: int, length: int) -> bool:
    """Whether an Adobe segment says that the pixels are not YCbCr."""
    return bytes(data[at : at + len(_ADOBE)]) == _ADOBE and (length < 14 or data[at + 11] != _ADOBE_YCC)
