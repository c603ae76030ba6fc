"""Goes through a tar archive once to find where its samples are."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from ...columns import IntArray
from ...errors import FormatError
from ..windows import Windows
from .blocks import BLOCK
from .headers import EXTENSION_BYTES, MemberTable, read_members, refuse_truncation
from .names import RESERVED_FIELDS, NameTable, group_names


@dataclass(frozen=True, slots=True)
class Census:
    """(samples,) int64 byte offsets where samples start and stop in the archive; its fields; its length in bytes."""

    starts: IntArray
    stops: IntArray
    fields: frozenset[str]
    length: int


def take_census(windows: Windows, shard: str) -> Census:
    """Read an archive's headers, front to back.

    Raises:
        FormatError: the archive is damaged, truncated, goes on after its end mark, names a field of a sample twice, or
            has members of which none belongs to a sample.
    """
    samples = _Samples()
    offset, passed_over, example = 0, 0, ""
    while True:
        window = windows.read(offset, BLOCK)
        members = read_members(window, shard, offset, whole=False)
        if members.resume == 0 and not members.ended and len(window) >= BLOCK:
            # A header extension that the window cuts off.
            window = windows.read(offset, 4 * EXTENSION_BYTES)
            members = read_members(window, shard, offset, whole=True)
        table = group_names(members.names)
        samples.add(table, members, shard, offset)
        ignored = members.skipped + len(members.names) - len(table.members)
        if ignored and not passed_over:
            example = members.last
        passed_over += ignored
        if members.ended or len(window) < BLOCK:
            break
        if offset + members.resume >= windows.end and not len(windows.read(offset + members.resume, 1)):
            refuse_truncation(members, windows.end - offset, shard, offset, padded=True)
        offset += members.resume
    _check_tail(windows, offset + members.resume, shard, ended=members.ended)
    census = samples.census(windows.end)
    if passed_over and not len(census.starts):
        raise FormatError(
            shard,
            f"none of its {passed_over} members belongs to a sample ('{example}' is one): samples are files named "
            "KEY.FIELD; check the URL, or pack the folder with `penstock pack`",
            offset=0,
        )
    return census


@dataclass(slots=True)
class _Samples:
    """The samples seen so far; the last one may go on in the next window."""

    starts: list[IntArray] = field(default_factory=list)
    stops: list[IntArray] = field(default_factory=list)
    fields: set[str] = field(default_factory=set)
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
        stops = base + (members.starts + members.sizes)[table.members[last]]
        if goes_on:
            self.stops[-1][-1] = stops[0]
            starts, stops = starts[1:], stops[1:]
        if len(starts):
            self.starts.append(starts)
            self.stops.append(stops)
        newest = frozenset(table.fields[code] for code in table.codes[first[-1] :].tolist())
        self.open_fields = newest | self.open_fields if goes_on and table.samples == 1 else newest
        self.open_key = table.key(-1)
        self.fields.update(table.fields)

    def census(self, length: int) -> Census:
        none = [np.zeros(0, np.int64)]
        return Census(
            np.concatenate(self.starts or none), np.concatenate(self.stops or none), frozenset(self.fields), length
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
