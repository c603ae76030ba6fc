"""Goes through a tar archive once to find where its samples are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import FormatError
from .blocks import BLOCK
from .headers import EXTENSION_BYTES, MemberTable, read_members, refuse_truncation
from .links import Placed, are_of_samples, doubt_lost, place_links
from .names import RESERVED_FIELDS, NameTable, group_names, hash_keys

if TYPE_CHECKING:
    from ...columns import AnyArray, IntArray
    from ..windows import Windows


@dataclass(frozen=True, slots=True)
class Census:
    """(samples,) int64 byte offsets where samples start and stop in the archive; its fields; its length in bytes.

    ``again``: (pairs, 2) int64 ordinals of samples that seem to have one key, the next sample of it in the second
    column; ``apart``: (pairs,) bool, whether they have no field in common. ``is_linked``: members that are links were
    passed over. ``placed`` has the links where they were not, and ``doubt`` says which of these was left out.
    """

    starts: IntArray
    stops: IntArray
    fields: frozenset[str]
    length: int
    again: IntArray = field(default_factory=lambda: np.zeros((0, 2), np.int64))
    apart: AnyArray = field(default_factory=lambda: np.zeros(0, bool))
    is_linked: bool = False
    placed: Placed | None = None
    doubt: str = ""


@dataclass(slots=True)
class _Ending:
    """Facts about an archive that are known once its last header was read."""

    members: int = 0  # that belong to no sample
    example: str = ""
    is_linked: bool = False


def take_census(windows: Windows, shard: str) -> Census:
    """Read an archive's headers, front to back; links are passed over.

    Raises:
        FormatError: the archive is damaged, truncated, goes on after its end mark, names a field of a sample twice, or
            has members of which none belongs to a sample.
    """
    samples, ending = _Samples(), _Ending()
    for offset, members, table in _read_tables(windows, shard, ending):
        samples.add(table, members, shard, offset)
    census = samples.census(windows.end, is_linked=ending.is_linked)
    _refuse_strangers(census, ending, shard)
    return census


def take_linked_census(windows: Windows, shard: str) -> Census:
    """As ``take_census``, with links as members; all headers of the archive are held in memory for it.

    Raises:
        FormatError: a hard link leads to nothing in the archive, too.
    """
    ending = _Ending()
    tables = [_move(members, offset) for offset, members, _ in _read_tables(windows, shard, ending)]
    placed = place_links(_join(tables))
    doubt = doubt_lost(placed, shard)
    table = group_names(placed.members.names)
    samples = _Samples()
    samples.add(table, placed.members, shard, 0)
    census = replace(samples.census(windows.end), placed=placed, doubt=doubt)
    _refuse_strangers(census, ending, shard)
    return census


def find_keys(windows: Windows, shard: str, census: Census, ordinals: IntArray) -> dict[int, tuple[bytes, str, int]]:
    """Of samples of a census: their keys, names and offsets of their first members."""
    wanted = set(ordinals.tolist())
    found: dict[int, tuple[bytes, str, int]] = {}
    if census.placed is not None:
        tables = iter([(0, census.placed.members, group_names(census.placed.members.names))])
    else:
        tables = _read_tables(windows, shard, _Ending())
    samples, key = -1, None
    for offset, members, table in tables:
        first = np.flatnonzero(np.diff(table.rows, prepend=-1)).tolist()
        for row, index in enumerate(first):
            if row > 0 or table.key(index) != key:
                samples += 1
                if samples in wanted:
                    record = offset + int(members.records[table.members[index]])
                    found[samples] = (table.key(index), table.name(index), record)
        if first:
            key = table.key(-1)
    return found


def _read_tables(windows: Windows, shard: str, ending: _Ending) -> Iterator[tuple[int, MemberTable, NameTable]]:
    """The members of an archive, window by window, with the offset of each window, and as samples.

    Raises:
        FormatError: the archive is damaged, truncated, or goes on after its end mark.
    """
    offset = 0
    while True:
        window = windows.read(offset, BLOCK)
        members = read_members(window, shard, offset, whole=False)
        if members.resume == 0 and not members.ended and len(window) >= BLOCK:
            # A header extension that the window cuts off.
            window = windows.read(offset, 4 * EXTENSION_BYTES)
            members = read_members(window, shard, offset, whole=True)
        table = group_names(members.names)
        yield offset, members, table
        ignored = members.skipped + len(members.names) - len(table.members)
        if ignored and not ending.members:
            ending.example = members.last
        ending.members += ignored
        ending.is_linked = ending.is_linked or (bool(members.links) and are_of_samples(members.links))
        if members.ended or len(window) < BLOCK:
            break
        if offset + members.resume >= windows.end and not len(windows.read(offset + members.resume, 1)):
            refuse_truncation(members, windows.end - offset, shard, offset, padded=True)
        offset += members.resume
    _check_tail(windows, offset + members.resume, shard, ended=members.ended)


def _refuse_strangers(census: Census, ending: _Ending, shard: str) -> None:
    if ending.members and not len(census.starts) and not census.is_linked:
        raise FormatError(
            shard,
            f"none of its {ending.members} members belongs to a sample ('{ending.example}' is one): samples are files "
            "named KEY.FIELD; check the URL, or pack the folder with `penstock pack`",
            offset=0,
        )


def _move(members: MemberTable, offset: int) -> MemberTable:
    """The table with offsets that count from the archive's beginning."""
    return replace(
        members,
        records=members.records + offset,
        starts=members.starts + offset,
        stops=members.stops + offset,
        links=[replace(link, record=link.record + offset, stop=link.stop + offset) for link in members.links],
    )


def _join(tables: Sequence[MemberTable]) -> MemberTable:
    """One table of all members."""
    width = max(table.names.shape[1] for table in tables)
    before = np.cumsum([0, *(len(table.starts) for table in tables)]).tolist()
    return replace(
        tables[-1],
        records=np.concatenate([table.records for table in tables]),
        starts=np.concatenate([table.starts for table in tables]),
        sizes=np.concatenate([table.sizes for table in tables]),
        stops=np.concatenate([table.stops for table in tables]),
        names=np.concatenate([np.pad(t.names, ((0, 0), (0, width - t.names.shape[1]))) for t in tables]),
        links=[
            replace(link, place=link.place + count)
            for count, table in zip(before, tables, strict=False)
            for link in table.links
        ],
    )


@dataclass(slots=True)
class _Samples:
    """The samples seen so far; the last one may continue in the next window.

    Of each sample's key and fields a number is kept, (samples,) uint64 hashes and int64 bits, to find keys that come
    again: 16 bytes a sample of this archive.
    """

    starts: list[IntArray] = field(default_factory=list)
    stops: list[IntArray] = field(default_factory=list)
    keys: list[AnyArray] = field(default_factory=list)
    bits: list[IntArray] = field(default_factory=list)
    fields: dict[str, int] = field(default_factory=dict)
    open_key: bytes | None = None
    open_fields: frozenset[str] = frozenset()

    def add(self, table: NameTable, members: MemberTable, shard: str, base: int) -> None:
        if table.samples == 0:
            return
        goes_on = table.key(0) == self.open_key
        refuse_duplicates(table, members, self.open_fields if goes_on else frozenset(), shard, base)
        first = np.flatnonzero(np.diff(table.rows, prepend=-1))
        last = np.append(first[1:], len(table.rows)) - 1
        starts = base + members.records[table.members[first]]
        stops = base + members.stops[table.members[last]]
        keys = hash_keys(table.names[first], table.dots[first])
        # Past 62 fields some share a bit, and seem to be one.
        bit = [1 << self.fields.setdefault(name, len(self.fields)) % 62 for name in table.fields]
        bits = np.bitwise_or.reduceat(np.array(bit, np.int64)[table.codes], first)
        if goes_on:
            self.stops[-1][-1] = stops[0]
            self.bits[-1][-1] |= bits[0]
            starts, stops, keys, bits = starts[1:], stops[1:], keys[1:], bits[1:]
        if len(starts):
            self.starts.append(starts)
            self.stops.append(stops)
            self.keys.append(keys)
            self.bits.append(bits)
        newest = frozenset(table.fields[code] for code in table.codes[first[-1] :].tolist())
        self.open_fields = newest | self.open_fields if goes_on and table.samples == 1 else newest
        self.open_key = table.key(-1)

    def census(self, length: int, *, is_linked: bool = False) -> Census:
        if not self.starts:
            none = np.zeros(0, np.int64)
            return Census(none, none, frozenset(), length, is_linked=is_linked)
        keys, bits = np.concatenate(self.keys), np.concatenate(self.bits)
        order = np.argsort(keys, kind="stable")
        same = np.flatnonzero(keys[order[1:]] == keys[order[:-1]])
        again = np.stack([order[same], order[same + 1]], axis=1)
        return Census(
            np.concatenate(self.starts),
            np.concatenate(self.stops),
            frozenset(self.fields),
            length,
            again=again,
            apart=bits[again[:, 0]] & bits[again[:, 1]] == 0,
            is_linked=is_linked,
        )


def refuse_duplicates(table: NameTable, members: MemberTable, carried: frozenset[str], shard: str, base: int) -> None:
    """Raise FormatError where a sample has a field twice; its first sample has the fields ``carried`` already."""
    pairs = table.rows * len(table.fields) + table.codes
    twice = bool((np.diff(np.sort(pairs)) == 0).any())
    if not twice and carried.isdisjoint(table.fields) and RESERVED_FIELDS.isdisjoint(table.fields):
        return
    seen = {(0, name) for name in carried}
    for index, (row, code) in enumerate(zip(table.rows.tolist(), table.codes.tolist(), strict=True)):
        name = table.fields[code]
        if (row, name) in seen or name in RESERVED_FIELDS:
            reserved = " (a reserved name)" if name in RESERVED_FIELDS else ""
            raise FormatError(
                shard,
                f"member '{table.name(index)}' gives its sample the field '{name}' a second time{reserved}; rename "
                "it, or write the shard with each key once",
                offset=base + int(members.records[table.members[index]]),
            )
        seen.add((row, name))


def _check_tail(windows: Windows, offset: int, shard: str, *, ended: bool) -> None:
    """After the last member there is nothing, an end mark, or zeros; anything else would be lost in silence."""
    while len(tail := windows.read(offset, 1)):
        found = np.flatnonzero(np.frombuffer(tail, np.uint8))
        if len(found) or (offset == 0 and not ended):
            what = (
                "data after the archive's end mark: archives joined with cat, or a hole of zeros in the shard; split "
                "it, or fetch it again"
                if ended
                else "the shard ends inside a header: it is truncated; fetch or write it again"
            )
            raise FormatError(shard, what, offset=offset + (int(found[0]) if ended else 0))
        offset += len(tail)
