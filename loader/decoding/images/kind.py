"""Image formats, recognised by their first bytes, the size that a header states, and the fields that hold images."""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np

from ....storage import NotFoundError, ObjectChangedError
from ...columns import BytesColumn
from ...errors import FormatError

if TYPE_CHECKING:
    from ...columns import Block
    from ...reading.chunk_source import ChunkSource


ImageKind = Literal["jpeg", "png", "webp"]

_JPEG = b"\xff\xd8\xff"
_PNG = b"\x89PNG\r\n\x1a\n"
_RIFF, _WEBP = b"RIFF", b"WEBP"  # four bytes of length lie between the two
_HEAD_BYTES = 12
_SIZED_BYTES = 30  # in which all headers but TIFF's state the size
_TIFF_ORDER = {b"II*\0": "<", b"MM\0*": ">"}
_TIFF_WIDTH, _TIFF_HEIGHT, _TIFF_EXTRA = 256, 257, 338
_TIFF_SHORT, _TIFF_LONG = 3, 4
_MULTIPLIED, _UNMULTIPLIED = 1, 2  # what ExtraSamples says of colours beside alpha


def image_kind(data: bytes | memoryview) -> ImageKind | None:
    """Recognise the format of ``data``; None for any other. Reads 12 bytes at most and decodes nothing."""
    head = bytes(data[:_HEAD_BYTES])
    if head.startswith(_JPEG):
        return "jpeg"
    if head.startswith(_PNG):
        return "png"
    if head.startswith(_RIFF) and head[8:] == _WEBP:
        return "webp"
    return None


def image_size(data: bytes | memoryview) -> tuple[int, int] | None:
    """Read (height, width) from the header of a PNG, WebP, BMP, GIF or TIFF; None for others, or one cut short."""
    head = bytes(data[:_SIZED_BYTES])
    try:
        if head.startswith(_PNG):
            width, height = struct.unpack_from(">II", head, 16)
        elif head.startswith(_RIFF) and head[8:12] == _WEBP:
            width, height = _webp_size(head)
        elif head.startswith(b"BM"):
            is_old = struct.unpack_from("<I", head, 14)[0] == 12
            width, height = map(abs, struct.unpack_from("<HH" if is_old else "<ii", head, 18))
        elif head[:6] in (b"GIF87a", b"GIF89a"):
            width, height = struct.unpack_from("<HH", head, 6)
        elif head[:4] in _TIFF_ORDER:
            width, height = _tiff_size(data, _TIFF_ORDER[head[:4]])
        else:
            return None
    except (struct.error, KeyError):
        return None
    return height, width


def _webp_size(head: bytes) -> tuple[int, int]:
    """Read width and height by RFC 9649, sections 2.5 to 2.7 (and RFC 6386, section 9.1, for the lossy form)."""
    form = head[12:16]
    if form == b"VP8X":
        low_high = struct.unpack_from("<HBHB", head, 24)
        return (low_high[0] | low_high[1] << 16) + 1, (low_high[2] | low_high[3] << 16) + 1
    if form == b"VP8L":
        (bits,) = struct.unpack_from("<I", head, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if form == b"VP8 ":
        width, height = struct.unpack_from("<HH", head, 26)
        return width & 0x3FFF, height & 0x3FFF
    raise KeyError(form)


def keep_tiff_colours(data: bytes | memoryview) -> bytes | memoryview | bytearray:
    """Return ``data``, or a copy of a TIFF whose colours a reader would otherwise multiply by its alpha.

    The copy says that its colours are premultiplied already (TIFF 6.0, section 18).
    """
    order = _TIFF_ORDER.get(bytes(data[:4]))
    if order is None:
        return data
    try:
        for entry, tag, kind in _tiff_entries(data, order):
            extra = struct.unpack_from(f"{order}IH", data, entry + 4)
            if tag == _TIFF_EXTRA and kind == _TIFF_SHORT and extra == (1, _UNMULTIPLIED):
                changed = bytearray(data)
                struct.pack_into(f"{order}H", changed, entry + 8, _MULTIPLIED)
                return changed
    except struct.error:
        return data
    return data


def _tiff_size(data: bytes | memoryview, order: str) -> tuple[int, int]:
    """Read width and height of the first image."""
    found = {}
    for entry, tag, kind in _tiff_entries(data, order):
        if tag in (_TIFF_WIDTH, _TIFF_HEIGHT) and kind in (_TIFF_SHORT, _TIFF_LONG):
            found[tag] = struct.unpack_from(f"{order}{'H' if kind == _TIFF_SHORT else 'I'}", data, entry + 8)[0]
    return found[_TIFF_WIDTH], found[_TIFF_HEIGHT]


def _tiff_entries(data: bytes | memoryview, order: str) -> Iterator[tuple[int, int, int]]:
    """Yield place, tag and type of each entry of the first image's directory (TIFF 6.0, section 2)."""
    (at,) = struct.unpack_from(f"{order}I", data, 4)
    (count,) = struct.unpack_from(f"{order}H", data, at)
    for entry in range(at + 2, at + 2 + 12 * count, 12):
        yield entry, *struct.unpack_from(f"{order}HH", data, entry)


# In how many chunks from the data set's beginning on a first value is looked for.
LOOK_CHUNKS = 8


class ImageFields:
    """Looks at the first chunks of a data set, whatever this rank is to read, when it is first asked for a field.

    So every rank, world size and resume decodes alike. The answer for a field is that for its first value; where the
    first ``LOOK_CHUNKS`` chunks hold none, it is no. Chunks whose data are bad hold none: that is reported where their
    samples are due. Mutable state: the answers, under a lock.
    """

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        self._answers: dict[str, bool] = {}
        self._lock = threading.Lock()

    def __call__(self, name: str) -> bool:
        """Return whether the field holds images. Raises StorageError where a chunk cannot be fetched."""
        with self._lock:
            if name not in self._answers:
                self._look(name)
            return self._answers[name]

    def _look(self, name: str) -> None:
        from ...reading.checksum import has_whole_sums_alone  # which needs what worker processes do without

        # Of columns each has bytes of its own; fields of files lie in one chunk, which answers for all of them.
        # Where all is read and chunks have checksums as a whole alone, whole ones are read here, too, and compared.
        manifest, columns = self._chunks.manifest, self._chunks.columns
        are_whole = "columns" not in manifest.schema or (columns is None and has_whole_sums_alone(manifest))
        together = columns if are_whole else [name]
        source = self._chunks.apart(together)
        for chunk in range(min(LOOK_CHUNKS, manifest.num_chunks)):
            try:
                block = source.load(chunk)
            except (FormatError, NotFoundError, ObjectChangedError):
                continue
            for field, answer in _answers(block).items():
                self._answers.setdefault(field, answer)
            if name in self._answers:
                return
        self._answers[name] = False


def _answers(block: Block) -> dict[str, bool]:
    answers = {}
    for name, column in block.columns.items():
        if isinstance(column, BytesColumn) and not column.text:
            present = np.flatnonzero(column.starts >= 0)
            if len(present):
                start, stop = column.starts[present[0]], column.stops[present[0]]
                answers[name] = image_kind(column.buffer[start:stop]) is not None
    return answers
