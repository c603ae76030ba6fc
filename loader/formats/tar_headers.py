"""Tar headers, read many at once: from a run of blocks to a table of the regular files in it.

Pure: bytes in, arrays out. The fast path takes every block with a POSIX magic for a header and proves it by the chain
of sizes and the checksums; where the proof fails (archives inside the archive, headers without magic, PAX sizes) the
chain is walked header by header. Which members count, and under which names, follows CPython's ``tarfile``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..errors import FormatError
from .shard import AnyArray, IntArray

ByteMatrix = np.ndarray[tuple[int, ...], np.dtype[np.uint8]]

BLOCK = 512
# Linux's PATH_MAX; a longer name in a header is a lie about a length.
NAME_BYTES = 4096
# A PAX header or long name above this is no name but damage.
EXTENSION_BYTES = 1 << 20
# Sums of offsets and sizes stay inside int64.
_MAX_SIZE = 1 << 60

_MAGIC = int.from_bytes(b"usta", "little")
_WITHOUT_DATA = np.isin(np.arange(256), list(b"123456"))
_EXTENSION = np.isin(np.arange(256), list(b"xXgLK"))
_REGULAR = np.isin(np.arange(256), list(b"\x0007S"))
_OCTAL = 8 ** np.arange(10, -1, -1, dtype=np.int64)
_BYTE_LANES = np.uint64(0x00FF00FF00FF00FF)
_PAX_RECORD = re.compile(rb"(\d{1,20}) ([^=]+)=")


@dataclass(frozen=True, slots=True)
class MemberTable:
    """The regular files whose headers lie in a run of blocks; byte offsets count from the run's first byte.

    (members,) int64: ``records`` where a member's first header starts (its extension headers come first), ``starts``
    of its data and ``sizes``. ``names`` is (members, width) uint8, padded with NUL and one column wider than the
    longest name. ``resume`` is where the next record starts, which may be past the run; ``ended`` says that the
    archive's end mark is there. ``skipped`` counts members that are no regular files; ``last`` and ``last_start`` are
    the name and data of the last member of any kind, for messages.
    """

    records: IntArray
    starts: IntArray
    sizes: IntArray
    names: ByteMatrix
    resume: int
    ended: bool
    skipped: int
    last: str
    last_start: int


@dataclass(frozen=True, slots=True)
class _Chain:
    """All headers of a run in order: block index, 512 bytes each, data size, index of the block after the data."""

    blocks: IntArray
    headers: ByteMatrix
    sizes: IntArray
    stops: IntArray


class _NotProvenError(Exception):
    """The fast path cannot vouch for its chain."""


def read_members(run: memoryview, shard: str, base: int, *, whole: bool) -> MemberTable:
    """The table of the regular files in ``run``, which starts with a header at byte ``base`` of the archive.

    ``whole`` says that nothing follows the run. Data of members need not lie in the run, headers and their extensions
    do: a record cut off by the run's end is left to ``resume``.

    Raises:
        FormatError: a block that should be a header is none, or a header that contradicts itself.
    """
    try:
        return _tabulate(run, _jump(run), shard, base, whole=whole, walked=False)
    except _NotProvenError:
        return _tabulate(run, _walk(run, shard, base), shard, base, whole=whole, walked=True)


def refuse_truncation(members: MemberTable, length: int, shard: str, base: int) -> None:
    """Raise FormatError where the last member of a run of ``length`` bytes, the archive's end, is cut off."""
    if members.resume - BLOCK >= length:
        start, stop = int(members.last_start), members.resume
    elif len(members.starts) and members.starts[-1] + members.sizes[-1] > length:
        start, stop = int(members.starts[-1]), int(members.starts[-1] + members.sizes[-1])
    else:
        return
    raise FormatError(
        shard,
        f"member '{members.last}' needs bytes up to {base + stop}, the shard ends at byte {base + length}: it is "
        "truncated, or the size is wrong; fetch or write it anew",
        offset=base + start - BLOCK,
    )


def _jump(run: memoryview) -> _Chain:
    """The chain by magic, checked at once. Raises _NotProvenError."""
    count = len(run) // BLOCK
    if count == 0:
        raise _NotProvenError
    magic: AnyArray = np.ndarray((count,), "<u4", buffer=run, offset=257, strides=(BLOCK,))
    blocks = np.flatnonzero(magic == _MAGIC)
    if len(blocks) == 0 or blocks[0] != 0:
        raise _NotProvenError
    headers = np.frombuffer(run, np.uint8, count * BLOCK).reshape(count, BLOCK)[blocks]
    sizes = _sizes(headers)
    stops = blocks + 1 + np.where(_is_dataless(headers), 0, (sizes + (BLOCK - 1)) >> 9)
    if not np.array_equal(stops[:-1], blocks[1:]) or not _checksums_hold(headers):
        raise _NotProvenError
    stop = int(stops[-1])
    if stop < count and any(run[stop * BLOCK : (stop + 1) * BLOCK]):
        raise _NotProvenError
    return _Chain(blocks, headers, sizes, stops)


def _sizes(headers: ByteMatrix) -> IntArray:
    """(n,) int64 sizes of (n, 512) headers in plain octal. Raises _NotProvenError for any other notation."""
    digits = headers[:, 124:135] - np.uint8(48)
    end = headers[:, 135]
    if (digits > 7).any() or ((end != 0) & (end != 32)).any():
        raise _NotProvenError
    return digits.astype(np.int64) @ _OCTAL


def _checksums_hold(headers: ByteMatrix) -> bool:
    """Whether every header's bytes add up to the sum it states, in the notation that all writers of today use."""
    words = headers.view("<u8")
    # 128 bytes are added in each 16-bit lane: 128 * 255 < 2**16.
    lanes = ((words & _BYTE_LANES) + ((words >> np.uint64(8)) & _BYTE_LANES)).sum(axis=1, dtype=np.uint64)
    totals = ((lanes * np.uint64(0x0001000100010001)) >> np.uint64(48)).astype(np.int64)
    field = headers[:, 148:156].astype(np.int64)
    totals += 8 * 32 - field.sum(axis=1)
    digits = field[:, :6] - 48
    if not (((digits >= 0) & (digits <= 7)).all() and ((field[:, 6] == 0) | (field[:, 6] == 32)).all()):
        raise _NotProvenError
    return bool((digits @ _OCTAL[5:] == totals).all())


def _is_dataless(headers: ByteMatrix) -> AnyArray:
    """(n,) bool: links, directories, devices; and the directories of old tars, plain files named with a slash."""
    kinds = headers[:, 156]
    dataless: AnyArray = _WITHOUT_DATA[kinds]
    for index in np.flatnonzero(kinds == 0).tolist():
        dataless[index] = _text(headers[index, :100]).endswith(b"/")
    return dataless


def _walk(run: memoryview, shard: str, base: int) -> _Chain:
    """The chain header by header: any notation of sizes and sums, PAX sizes, headers without magic."""
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
        if not _sum_holds(header):
            if not any(header):
                break
            raise FormatError(shard, _no_header(header, before), offset=offset)
        before = _show(_text(header[:100]))
        kind = header[156]
        size = _number(header[124:136])
        if size is None or not 0 <= size <= _MAX_SIZE:
            raise FormatError(
                shard, f"member '{before}' has no valid size ({header[124:136]!r}); write the shard anew", offset=offset
            )
        if _EXTENSION[kind]:
            payload = bytes(run[(at + 1) * BLOCK : (at + 1) * BLOCK + size])
            if kind in b"xX" and len(payload) == size and pax_size is None:
                pax_size = _pax_size(_pax_records(payload, shard, offset), shard, offset)
        elif pax_size is not None:
            size, pax_size = pax_size, None
        dataless = _WITHOUT_DATA[kind] or (kind == 0 and before.endswith("/"))
        blocks.append(at)
        sizes.append(size)
        at += 1 if dataless else 1 + (size + BLOCK - 1) // BLOCK
        stops.append(at)
    index = np.array(blocks, np.int64)
    headers = np.frombuffer(run, np.uint8, count * BLOCK).reshape(count, BLOCK)[index]
    return _Chain(index, headers, np.array(sizes, np.int64), np.array(stops, np.int64))


def _sum_holds(header: bytes) -> bool:
    stated = _number(header[148:156])
    rest = header[:148] + header[156:]
    total = 8 * 32 + sum(rest)
    # Some historic writers added the bytes as signed ones.
    return stated is not None and stated in (total, total - 256 * sum(byte > 127 for byte in rest))


def _number(field: bytes) -> int | None:
    """A header's number: octal text, or base 256 where the first bit is set; None where it is neither."""
    if field[0] & 0x80:
        return int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big") if field[0] == 0x80 else -1
    digits = field.split(b"\0")[0].strip()
    if not digits:
        return 0
    return int(digits, 8) if re.fullmatch(rb"[0-7]+", digits) else None


def _no_header(block: bytes, before: str) -> str:
    told = f"; the size of member '{before}' before it leads here" if before else ""
    return (
        f"expected a tar header, found {block[:16]!r}... without a valid checksum{told}. "
        "The shard is damaged or no tar: fetch or write it anew"
    )


def _tabulate(run: memoryview, chain: _Chain, shard: str, base: int, *, whole: bool, walked: bool) -> MemberTable:
    """Fold extension headers into the members that they extend, and keep the regular files."""
    count = len(run) // BLOCK
    blocks, headers, sizes = chain.blocks, chain.headers, chain.sizes
    resume = int(chain.stops[-1]) if len(blocks) else 0
    ended = resume < count
    kinds = headers[:, 156]
    extensions = np.flatnonzero(_EXTENSION[kinds])
    records = blocks
    names: dict[int, bytes] = {}
    if len(extensions):
        records = blocks.copy()
        opened: int | None = None  # the first header of the record that is being read
        known = len(blocks)
        following = 0
        for index in extensions.tolist():
            if opened is None or index != following:
                opened = index
            following = index + 1
            name, pax_size = _extension(run, chain, index, shard, base, whole=whole)
            owner = following
            if owner < known:
                records[owner] = blocks[opened]
                if pax_size is not None and not walked and pax_size != sizes[owner]:
                    raise _NotProvenError
            if name is not None:
                # Of several extensions the first is the outermost, and wins.
                names.setdefault(opened, name)
        if following == known:
            assert opened is not None
            if whole or ended:
                raise FormatError(
                    shard,
                    "the member that this header extension is for is missing: the shard is truncated; fetch or write "
                    "it anew",
                    offset=base + int(blocks[opened]) * BLOCK,
                )
            resume = int(blocks[opened])
        by_block = {int(blocks[opened]): name for opened, name in names.items()}
        names = {i: by_block[r] for i, r in enumerate(records.tolist()) if r in by_block}
    regular = np.flatnonzero(_REGULAR[kinds] & ~_is_dataless(headers))
    _refuse_sparse(kinds, blocks, shard, base)
    last = _show(_text(headers[-1, :100])) if len(blocks) else ""
    return MemberTable(
        records=records[regular] * BLOCK,
        starts=(blocks[regular] + 1) * BLOCK,
        sizes=sizes[regular],
        names=_names(headers, regular, names, blocks, shard, base),
        resume=resume * BLOCK,
        ended=ended,
        skipped=len(blocks) - len(regular) - len(extensions),
        last=last,
        last_start=(int(blocks[-1]) + 1) * BLOCK if len(blocks) else 0,
    )


def _extension(
    run: memoryview, chain: _Chain, index: int, shard: str, base: int, *, whole: bool
) -> tuple[bytes | None, int | None]:
    """The name and the size that the extension header ``index`` gives to its member, None where it gives none."""
    block, size, kind = int(chain.blocks[index]), int(chain.sizes[index]), int(chain.headers[index, 156])
    offset = base + block * BLOCK
    if size > EXTENSION_BYTES:
        raise FormatError(
            shard,
            f"a header extension of {size} bytes, more than {EXTENSION_BYTES}; the shard is damaged: write it anew",
            offset=offset,
        )
    start = (block + 1) * BLOCK
    if start + size > len(run):
        if whole:
            raise FormatError(
                shard,
                "the shard ends inside a header extension: it is truncated; fetch or write it anew",
                offset=offset,
            )
        return None, None
    payload = bytes(run[start : start + size])
    if kind == ord("L"):
        return _text(payload), None
    if kind == ord("K"):
        return None, None
    # Most PAX headers only carry times; a look at the bytes is much cheaper than parsing them.
    if b"path=" not in payload and b"size=" not in payload and b"GNU.sparse." not in payload:
        return None, None
    records = _pax_records(payload, shard, offset)
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise FormatError(shard, "a sparse member; write the shard without --sparse", offset=offset)
    if kind == ord("g"):
        if b"path" in records or b"size" in records:
            raise FormatError(shard, "a global PAX header with a path or size; write the shard anew", offset=offset)
        return None, None
    path = records.get(b"path")
    return None if path is None else path.rstrip(b"/"), _pax_size(records, shard, offset)


def _pax_records(payload: bytes, shard: str, offset: int) -> dict[bytes, bytes]:
    """The ``LENGTH KEY=VALUE`` lines of a PAX header; of equal keys the last wins."""
    records: dict[bytes, bytes] = {}
    at = 0
    while at < len(payload) and payload[at] != 0:
        match = _PAX_RECORD.match(payload, at)
        stop = at + int(match[1]) if match else 0
        if match is None or not match.end() < stop <= len(payload) or payload[stop - 1] != 10:
            raise FormatError(
                shard,
                f"a PAX header with a broken record {payload[at : at + 24]!r}; write the shard anew",
                offset=offset,
            )
        records[match[2]] = payload[match.end() : stop - 1]
        at = stop
    return records


def _pax_size(records: dict[bytes, bytes], shard: str, offset: int) -> int | None:
    text = records.get(b"size")
    if text is None:
        return None
    if not text.isdigit() or int(text) > _MAX_SIZE:
        raise FormatError(shard, f"a PAX header with size {text[:24]!r}; write the shard anew", offset=offset)
    return int(text)


def _refuse_sparse(kinds: AnyArray, blocks: IntArray, shard: str, base: int) -> None:
    sparse = np.flatnonzero(kinds == ord("S"))
    if len(sparse):
        offset = base + int(blocks[sparse[0]]) * BLOCK
        raise FormatError(shard, "a sparse member; write the shard without --sparse", offset=offset)


def _names(
    headers: ByteMatrix, regular: IntArray, extended: dict[int, bytes], blocks: IntArray, shard: str, base: int
) -> ByteMatrix:
    """(members, width) uint8: each regular member's name, from its extension, or from name and prefix."""
    special: dict[int, bytes] = {}
    place = {index: row for row, index in enumerate(regular.tolist())} if extended else {}
    for index, name in extended.items():
        row = place.get(index)
        if row is not None:
            special[row] = name
    prefixed = np.flatnonzero(headers[regular, 345])
    for row in prefixed.tolist():
        if row not in special:
            header = headers[regular[row]]
            special[row] = _text(header[345:500]) + b"/" + _text(header[:100])
    width = max((100, *map(len, special.values())))
    if width > NAME_BYTES:
        row = max(special, key=lambda row: len(special[row]))
        raise FormatError(
            shard,
            f"a member name of {width} bytes, more than {NAME_BYTES}; give the member a shorter name",
            offset=base + int(blocks[regular[row]]) * BLOCK,
        )
    names = np.zeros((len(regular), width + 1), np.uint8)
    names[:, :100] = headers[regular, :100]
    for row, name in special.items():
        names[row] = 0
        names[row, : len(name)] = np.frombuffer(name, np.uint8)
    return names


def _text(field: Any) -> bytes:
    """The bytes before the first NUL."""
    return bytes(field).split(b"\0", 1)[0]


def _show(name: bytes) -> str:
    return name.decode("utf-8", "backslashreplace")
