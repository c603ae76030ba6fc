"""From a run of tar blocks to a table of the regular files in it.

Pure: bytes in, arrays out. Which members count, and under which names, follows CPython's ``tarfile``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import FormatError
from .blocks import (
    BLOCK,
    EXTENSION_KINDS,
    ByteMatrix,
    Chain,
    NotProvenError,
    is_dataless,
    jump_headers,
    parse_pax,
    pax_size_of,
    show_name,
    text_of,
    walk_headers,
)

if TYPE_CHECKING:
    from ...columns import AnyArray, IntArray

# Linux's PATH_MAX; a longer name in a header is a lie about a length.
NAME_BYTES = 4096
# A PAX header or long name above this is damage.
EXTENSION_BYTES = 1 << 20

_EXTENSION = np.isin(np.arange(256), list(EXTENSION_KINDS))
_REGULAR = np.isin(np.arange(256), list(b"\x0007S"))
_HARD, _SYMBOLIC = b"12"
_LINK = np.isin(np.arange(256), [_HARD, _SYMBOLIC])


@dataclass(frozen=True, slots=True)
class Link:
    """A link, which comes after ``place`` regular files; its headers are the bytes ``record`` to ``stop``.

    The ``target`` of a hard link is an earlier member, that of a symbolic one a path from its own folder.
    """

    place: int
    record: int
    stop: int
    name: bytes
    target: bytes
    is_symbolic: bool


@dataclass(frozen=True, slots=True)
class MemberTable:
    """The regular files whose headers lie in a run of blocks; byte offsets count from the run's first byte.

    (members,) int64: ``records`` where a member's first header starts (its extension headers come first), ``starts``
    of its data and ``sizes``, and ``stops`` of what is its own. ``names`` is (members, width) uint8, padded with NUL
    and one column wider than the longest name. ``links`` are no members yet: `links.place_links` makes them some.
    ``resume`` is where the next record starts, which may be past the run; ``ended`` says that the archive's end mark is
    there. ``skipped`` counts members that are no regular files; ``last`` and ``last_start`` are the name and data of
    the last member of any kind, for messages.
    """

    records: IntArray
    starts: IntArray
    sizes: IntArray
    stops: IntArray
    names: ByteMatrix
    links: Sequence[Link]
    resume: int
    ended: bool
    skipped: int
    last: str
    last_start: int


def read_members(run: memoryview, shard: str, base: int, *, whole: bool) -> MemberTable:
    """The table of the regular files in ``run``, which starts with a header at byte ``base`` of the archive.

    ``whole`` says that nothing follows the run. Data of members need not lie in the run, headers and their extensions
    do: a record cut off by the run's end is left to ``resume``.

    Raises:
        FormatError: a block that should be a header is not one, or a header contradicts itself.
    """
    try:
        return _tabulate(run, jump_headers(run), shard, base, whole=whole, walked=False)
    except NotProvenError:
        return _tabulate(run, walk_headers(run, shard, base), shard, base, whole=whole, walked=True)


def refuse_truncation(members: MemberTable, length: int, shard: str, base: int, *, padded: bool) -> None:
    """Raise FormatError where the last member of a run of ``length`` bytes is cut off.

    ``padded`` requires its padding too, as at an archive's end, but not at a chunk's.
    """
    if members.resume - (0 if padded else BLOCK - 1) > length:
        start, stop = int(members.last_start), members.resume
    elif len(members.starts) and members.starts[-1] + members.sizes[-1] > length:
        start, stop = int(members.starts[-1]), int(members.starts[-1] + members.sizes[-1])
    else:
        return
    raise FormatError(
        shard,
        f"member '{members.last}' needs bytes up to {base + stop}, the shard ends at byte {base + length}: it is "
        "truncated, or the size is wrong; fetch or write it again",
        offset=base + start - BLOCK,
    )


def _tabulate(run: memoryview, chain: Chain, shard: str, base: int, *, whole: bool, walked: bool) -> MemberTable:
    """Fold extension headers into the members that they extend, and keep the regular files."""
    count = len(run) // BLOCK
    blocks, headers, sizes = chain.blocks, chain.headers, chain.sizes
    resume = int(chain.stops[-1]) if len(blocks) else 0
    ended = resume < count
    kinds = headers[:, 156]
    extensions = np.flatnonzero(_EXTENSION[kinds])
    records = blocks
    names: dict[int, bytes] = {}
    targets: dict[int, bytes] = {}
    if len(extensions):
        records = blocks.copy()
        opened: int | None = None  # the first header of the record that is being read
        known = len(blocks)
        following = 0
        for index in extensions.tolist():
            if opened is None or index != following:
                opened = index
            following = index + 1
            name, target, pax_size = _extension(run, chain, index, shard, base, whole=whole)
            owner = following
            if owner < known:
                records[owner] = blocks[opened]
                if pax_size is not None and not walked and pax_size != sizes[owner]:
                    raise NotProvenError
            if name is not None:
                # Of several extensions the first is the outermost, and wins.
                names.setdefault(opened, name)
            if target is not None:
                targets.setdefault(opened, target)
        if following == known:
            assert opened is not None
            if whole or ended:
                raise FormatError(
                    shard,
                    "the member that this header extension is for is missing: the shard is truncated; fetch or write "
                    "it again",
                    offset=base + int(blocks[opened]) * BLOCK,
                )
            resume = int(blocks[opened])
        names, targets = _by_owner(names, blocks, records), _by_owner(targets, blocks, records)
    regular = np.flatnonzero(_REGULAR[kinds] & ~is_dataless(headers))
    _refuse_sparse(kinds, blocks, shard, base)
    last = show_name(text_of(headers[-1, :100])) if len(blocks) else ""
    starts = (blocks[regular] + 1) * BLOCK
    linked = np.flatnonzero(_LINK[kinds])
    return MemberTable(
        records=records[regular] * BLOCK,
        starts=starts,
        sizes=sizes[regular],
        stops=starts + sizes[regular],
        names=_names(headers, regular, names, blocks, shard, base),
        links=[
            Link(
                place=int(np.searchsorted(regular, index)),
                record=int(records[index]) * BLOCK,
                stop=(int(blocks[index]) + 1) * BLOCK,
                name=names[index] if index in names else _plain_name(headers[index]),
                target=targets.get(index, text_of(headers[index, 157:257])),
                is_symbolic=int(kinds[index]) == _SYMBOLIC,
            )
            for index in linked.tolist()
        ],
        resume=resume * BLOCK,
        ended=ended,
        skipped=len(blocks) - len(regular) - len(extensions),
        last=last,
        last_start=(int(blocks[-1]) + 1) * BLOCK if len(blocks) else 0,
    )


def _by_owner(texts: Mapping[int, bytes], blocks: IntArray, records: IntArray) -> dict[int, bytes]:
    """Map headers to the texts of their records: a text belongs to the first extension header of its record."""
    by_block = {int(blocks[opened]): text for opened, text in texts.items()}
    return {i: by_block[r] for i, r in enumerate(records.tolist()) if r in by_block} if by_block else {}


def _extension(
    run: memoryview, chain: Chain, index: int, shard: str, base: int, *, whole: bool
) -> tuple[bytes | None, bytes | None, int | None]:
    """Name, link and size that the extension header ``index`` gives to its member, None where it gives none."""
    block, size, kind = int(chain.blocks[index]), int(chain.sizes[index]), int(chain.headers[index, 156])
    offset = base + block * BLOCK
    if size > EXTENSION_BYTES:
        raise FormatError(
            shard,
            f"a header extension of {size} bytes, more than {EXTENSION_BYTES}; the shard is damaged: write it again",
            offset=offset,
        )
    start = (block + 1) * BLOCK
    if start + size > len(run):
        if whole:
            raise FormatError(
                shard,
                "the shard ends inside a header extension: it is truncated; fetch or write it again",
                offset=offset,
            )
        return None, None, None
    payload = bytes(run[start : start + size])
    if kind == ord("L"):
        return text_of(payload), None, None
    if kind == ord("K"):
        return None, text_of(payload), None
    # Most PAX headers only carry times; a look at the bytes is much cheaper than parsing them.
    if b"path=" not in payload and b"size=" not in payload and b"GNU.sparse." not in payload:
        return None, None, None
    records = parse_pax(payload, shard, offset)
    if any(key.startswith(b"GNU.sparse.") for key in records):
        raise FormatError(shard, "a sparse member; write the shard without --sparse", offset=offset)
    if kind == ord("g"):
        if b"path" in records or b"size" in records:
            raise FormatError(shard, "a global PAX header with a path or size; write the shard again", offset=offset)
        return None, None, None
    path = records.get(b"path")
    name = None if path is None else path.rstrip(b"/")
    return name, records.get(b"linkpath"), pax_size_of(records, shard, offset)


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
            special[row] = _plain_name(headers[regular[row]])
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


def _plain_name(header: ByteMatrix) -> bytes:
    """The name in a header of 512 bytes itself, with its prefix."""
    name, prefix = text_of(header[:100]), text_of(header[345:500])
    return prefix + b"/" + name if prefix else name
