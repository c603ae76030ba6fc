"""Headers of JPEGs: the check that a decoder for plain JPEGs on a device can take one.

Markers are those of ITU-T T.81, table B.1.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

_START, _END, _SCAN = b"\xff\xd8", b"\xff\xd9", 0xDA
_PLAIN_FRAMES = (0xC0, 0xC1)  # baseline, and extended sequential with Huffman codes
_FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
_DCT_FRAMES = (0xC0, 0xC1, 0xC2, 0xC9, 0xCA)  # all that libjpeg decodes but lossless ones
_BARE = frozenset((0x01, *range(0xD0, 0xD8)))  # markers that no length follows
_EXIF_MARKER, _EXIF = 0xE1, b"Exif\0\0"
_ADOBE_MARKER, _ADOBE, _ADOBE_YCC = 0xEE, b"Adobe", 1
_QUANTIZATION, _HUFFMAN = 0xDB, 0xC4
_read_segment = struct.Struct(">BBH").unpack_from  # 0xFF, the marker, and the length of what follows it
_read_components = struct.Struct(">BHHB9B").unpack_from  # of a frame of three
_RGB, _COARSEST = list(b"RGB"), [0x11, 0x11]  # components' names; the factors of both colours
_MOST_SEGMENTS = 1024
_COLOURS = 3
# Of the luminance, relative to a chrominance of (1, 1): 4:4:4, 4:2:2, 4:4:0, 4:2:0, 4:1:1.
_SAMPLINGS = frozenset(((1, 1), (2, 1), (1, 2), (2, 2), (4, 1)))


@dataclass(frozen=True, slots=True)
class PlainJpeg:
    """A whole JPEG of 8 bits, Huffman codes, one frame that is not progressive, and YCbCr in a usual subsampling.

    ``sampling`` is the luminance's (horizontal, vertical) factor, relative to a chrominance of (1, 1). ``exif`` is
    where its EXIF segments' names begin, which tell decoders to turn the image. ``scan`` is where the first scan's
    header begins, ``tables`` are the markers of the segments of tables before it, and where these begin and end, and
    ``quantization`` those of its tables that the frame names.
    """

    height: int
    width: int
    sampling: tuple[int, int]
    exif: tuple[int, ...]
    scan: int
    tables: tuple[tuple[int, int, int], ...]
    quantization: tuple[int, ...]

    def is_one_scan(self, data: bytes | memoryview) -> bool:
        """Return whether all colours are in one scan of these data, and the tables that they need in the header."""
        scan = bytes(data[self.scan : self.scan + 7])
        if len(scan) < 7 or scan[0] != _COLOURS:
            return False
        found = {table for marker, begin, stop in self.tables for table in _read_tables(data, begin, stop, marker << 8)}
        return found.issuperset([*self.quantization, *_scan_tables(scan)])


def plain_jpeg(data: bytes | memoryview) -> PlainJpeg | None:
    """Parse the header; None for any other JPEG, one cut short, or with bytes between its segments."""
    try:
        return _walk(data)
    except (struct.error, IndexError):
        return None


def is_dct(data: bytes | memoryview) -> bool:
    """Return whether libjpeg can decode a JPEG at reduced size; False, too, where its header is not understood.

    A lossless one has no such form: some decoders then write all of it into room for the part.
    """
    at = _find_frame(data)
    return at is not None and data[at] in _DCT_FRAMES


def jpeg_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Read height and width from a JPEG's frame, whatever its kind; None without one."""
    at = _find_frame(data)
    return None if at is None or at + 8 > len(data) else struct.unpack_from(">HH", data, at + 4)


def _find_frame(data: bytes | memoryview) -> int | None:
    """Find the marker of the frame that libjpeg finds, which skips bytes between segments."""
    at = len(_START)
    try:
        for _ in range(_MOST_SEGMENTS):
            at += 1
            marker = data[at]
            if data[at - 1] != 0xFF or marker in (0, 0xFF):
                continue
            if marker in _FRAMES:
                return at
            at += 1
            if marker not in _BARE:
                at += max(2, data[at] << 8 | data[at + 1])
    except IndexError:
        return None
    return None


def _walk(data: bytes | memoryview) -> PlainJpeg | None:
    if bytes(data[:2]) != _START or bytes(data[-2:]) != _END:
        return None
    at, frame = 2, None
    exif: list[int] = []
    tables: list[tuple[int, int, int]] = []
    for _ in range(_MOST_SEGMENTS):
        lead, marker, length = _read_segment(data, at)
        while lead == marker == 0xFF:  # fill bytes
            at += 1
            lead, marker, length = _read_segment(data, at)
        begin, stop = at + 4, at + 2 + length
        if lead != 0xFF or length < 2 or stop > len(data):
            return None
        if marker == _SCAN:
            if frame is None:
                return None
            height, width, sampling, quantization = frame
            return PlainJpeg(height, width, sampling, tuple(exif), begin, tuple(tables), quantization)
        if marker in _FRAMES:
            frame = _read_frame(data, begin) if marker in _PLAIN_FRAMES and frame is None else None
            if frame is None:
                return None
        elif marker in (_QUANTIZATION, _HUFFMAN):
            tables.append((marker, begin, stop))
        elif marker == _EXIF_MARKER and bytes(data[begin : begin + len(_EXIF)]) == _EXIF:
            exif.append(begin)
        elif marker == _ADOBE_MARKER and _is_other_colour(data, begin, length):
            return None
        at = stop
    return None


def _read_tables(data: bytes | memoryview, begin: int, stop: int, kind: int) -> list[int]:
    """List the tables that a segment defines: ``kind``, of its marker, and number; of Huffman codes with the class."""
    segment, found, at = bytes(data[begin:stop]), [], 0
    while at < len(segment):
        head = segment[at]
        if kind == _HUFFMAN << 8:
            found.append(kind | head)
            at += 17 + sum(segment[at + 1 : at + 17])
        else:
            found.append(kind | head & 15)
            at += 129 if head >> 4 else 65
    return found


def _scan_tables(scan: bytes) -> list[int]:
    """List the Huffman tables, as in ``_read_tables``, of a scan of three components: for DC (class 0) and AC."""
    named = scan[2], scan[4], scan[6]
    return [_HUFFMAN << 8 | table for one in named for table in (one >> 4, 16 | one & 15)]


_Frame = tuple[int, int, tuple[int, int], tuple[int, ...]]


def _read_frame(data: bytes | memoryview, at: int) -> _Frame | None:
    """Read height, width, sampling and quantization tables of a frame of three 8-bit components.

    The first alone is sampled more finely.
    """
    precision, height, width, components, *each = _read_components(data, at)
    if precision != 8 or components != _COLOURS or not height or not width:
        return None
    names, factors, tables = each[::3], each[1::3], each[2::3]
    sampling = factors[0] >> 4, factors[0] & 15
    if sampling not in _SAMPLINGS or factors[1:] != _COARSEST or names == _RGB:
        return None
    return height, width, sampling, tuple([_QUANTIZATION << 8 | table for table in tables])


def _is_other_colour(data: bytes | memoryview, at: int, length: int) -> bool:
    """Return whether an Adobe segment says that the pixels are not YCbCr."""
    return bytes(data[at : at + len(_ADOBE)]) == _ADOBE and (length < 14 or data[at + 11] != _ADOBE_YCC)
