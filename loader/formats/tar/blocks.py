"""Finds the headers in a run of tar blocks.

There are two ways. The jump takes every block with a POSIX magic for a header, all at once, and proves it by the chain
of sizes and the checksums. Where the proof fails (archives inside the archive, headers without magic, numbers in other
notations, PAX sizes) the walk goes from header to header, with the standard library's ``tarfile``. PAX records are
parsed here, because ``tarfile`` takes 12 times as long for a chunk whose names stand in them.
"""

from __future__ import annotations

import re
import tarfile
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import FormatError

if TYPE_CHECKING:
    from ...columns import AnyArray, IntArray

ByteMatrix = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

BLOCK = 512
# Headers of the member that follows: PAX (x, and X by Sun), PAX for all that follow (g), long name (L) and link (K).
EXTENSION_KINDS = b"xXgLK"
# Sums of offsets and sizes stay inside int64.
_MAX_SIZE = 1 << 60

_MAGIC = int.from_bytes(b"usta", "little")
_WITHOUT_DATA = np.isin(np.arange(256), list(b"123456"))
_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_BYTE_LANES = np.uint64(0x00FF00FF00FF00FF)
_PAX_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")


@dataclass(frozen=True, slots=True)
class Chain:
    """All headers of a run in order: block index, 512 bytes each, data size, index of the block after the data."""

    blocks: IntArray
    headers: ByteMatrix
    sizes: IntArray
    stops: IntArray


class NotProvenError(Exception):
    """The fast path cannot vouch for its chain."""


def jump_headers(run: memoryview) -> Chain:
    """The chain by magic, checked at once. Raises NotProvenError."""
    count = len(run) // BLOCK
    if count == 0:
        raise NotProvenError
    magic: AnyArray = np.ndarray((count,), "<u4", buffer=run, offset=257, strides=(BLOCK,))
    blocks = np.flatnonzero(magic == _MAGIC)
    if len(blocks) == 0 or blocks[0] != 0:
        raise NotProvenError
    headers = np.frombuffer(run, np.uint8, count * BLOCK).reshape(count, BLOCK)[blocks]
    sizes = _sizes(headers)
    stops = blocks + 1 + np.where(is_dataless(headers), 0, (sizes + (BLOCK - 1)) >> 9)
    if not np.array_equal(stops[:-1], blocks[1:]) or not _checksums_hold(headers):
        raise NotProvenError
    stop = int(stops[-1])
    if stop < count and any(run[stop * BLOCK : (stop + 1) * BLOCK]):
        raise NotProvenError
    return Chain(blocks, headers, sizes, stops)


def _sizes(headers: ByteMatrix) -> IntArray:
    """(n,) int64 sizes of (n, 512) headers in plain octal. Raises NotProvenError for any other notation."""
    digits = headers[:, 124:135] - np.uint8(48)
    end = headers[:, 135]
    if (digits > 7).any() or ((end != 0) & (end != 32)).any():
        raise NotProvenError
    return digits.astype(np.int64) @ _OCTAL


def _checksums_hold(headers: ByteMatrix) -> bool:
    """Return whether every header's bytes add up to the sum it states, in the notation that today's writers use."""
    words = headers.view("<u8")
    # 128 bytes are added in each 16-bit lane: 128 * 255 < 2**16.
    lanes = ((words & _BYTE_LANES) + ((words >> np.uint64(8)) & _BYTE_LANES)).sum(axis=1, dtype=np.uint64)
    totals = ((lanes * np.uint64(0x0001000100010001)) >> np.uint64(48)).astype(np.int64)
    field = headers[:, 148:156].astype(np.int64)
    totals += 8 * 32 - field.sum(axis=1)
    digits = field[:, :7] - 48
    octal = (digits >= 0) & (digits <= 7)
    ended = (field[:, 6] == 0) | (field[:, 6] == 32)
    if not octal[:, :6].all() or not (octal[:, 6] | ended).all():
        raise NotProvenError
    stated = digits[:, :6] @ _OCTAL[5:]
    # Six digits are usual, seven (the tar of Rust) are allowed.
    return bool((np.where(ended, stated, 8 * stated + digits[:, 6]) == totals).all())


def is_dataless(headers: ByteMatrix) -> AnyArray:
    """(n,) bool: links, directories, devices; and the directories of old tars, plain files named with a slash."""
    kinds = headers[:, 156]
    dataless: AnyArray = _WITHOUT_DATA[kinds]
    for index in np.flatnonzero(kinds == 0).tolist():
        dataless[index] = text_of(headers[index, :100]).endswith(b"/")
    return dataless


def walk_headers(run: memoryview, shard: str, base: int) -> Chain:
    """The chain header by header: any notation of sizes and sums, PAX sizes, headers without magic.

    Raises:
        FormatError: a block that should be a header is not one, or has a size that cannot be.
    """
    count = len(run) // BLOCK
    blocks: list[int] = []
    sizes: list[int] = []
    stops: list[int] = []
    at = 0
    pax_size: int | None = None
    before = ""
    while at < count:
        header = bytes(run[at * BLOCK : (at + 1) * BLOCK])
        offset = base + at * BLOCK
        try:
            info = tarfile.TarInfo.frombuf(header, "utf-8", "surrogateescape")
        except tarfile.HeaderError as exc:
            if not any(header):
                break
            raise FormatError(shard, _no_header(header, before, exc), offset=offset) from exc
        before = show_name(text_of(header[:100]))
        kind, size = header[156], info.size
        if not 0 <= size <= _MAX_SIZE:
            raise FormatError(
                shard,
                f"member '{before}' has no valid size ({header[124:136]!r}); write the shard again",
                offset=offset,
            )
        if kind in EXTENSION_KINDS:
            payload = bytes(run[(at + 1) * BLOCK : (at + 1) * BLOCK + size])
            if kind in b"xX" and len(payload) == size and pax_size is None:
                pax_size = pax_size_of(parse_pax(payload, shard, offset), shard, offset)
        elif pax_size is not None:
            size, pax_size = pax_size, None
        blocks.append(at)
        sizes.append(size)
        at += 1 if _WITHOUT_DATA[kind] or info.isdir() else 1 + (size + BLOCK - 1) // BLOCK
        stops.append(at)
    index = np.array(blocks, np.int64)
    headers = np.frombuffer(run, np.uint8, count * BLOCK).reshape(count, BLOCK)[index]
    return Chain(index, headers, np.array(sizes, np.int64), np.array(stops, np.int64))


def _no_header(block: bytes, before: str, problem: Exception) -> str:
    hint = f"; the size of member '{before}' before it leads here" if before else ""
    return (
        f"expected a tar header, found {block[:16]!r}... ({problem}){hint}. The shard is damaged or not a tar: fetch "
        "or write it again"
    )


def parse_pax(payload: bytes, shard: str, offset: int) -> dict[bytes, bytes]:
    """The ``LENGTH KEY=VALUE`` lines of a PAX header; of equal keys the last wins."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(payload) and payload[at] != 0:
        match = _PAX_RECORD.match(payload, at)
        stop = at + int(match[1]) if match else 0
        if match is None or not match.end() < stop <= len(payload) or payload[stop - 1] != 10:
            raise FormatError(
                shard,
                f"a PAX header with a broken record {payload[at : at + 24]!r}; write the shard again",
                offset=offset,
            )
        records[match[2]] = payload[match.end() : stop - 1]
        at = stop
    return records


def pax_size_of(records: dict[bytes, bytes], shard: str, offset: int) -> int | None:
    text = records.get(b"size")
    if text is None:
        return None
    if not text.isdigit() or int(text) > _MAX_SIZE:
        raise FormatError(shard, f"a PAX header with size {text[:24]!r}; write the shard again", offset=offset)
    return int(text)


def text_of(field: Any) -> bytes:
    """The bytes before the first NUL."""
    return bytes(field).split(b"\0", 1)[0]


def show_name(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
