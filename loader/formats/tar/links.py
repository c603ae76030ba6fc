"""Members that are links: their content is that of another member, whose bytes lie elsewhere in the archive.

GNU tar writes the second name of a file as a hard link to the first. Where both lie in one run of bytes, a link is a
member like any other; so an index keeps a link and what it names in one chunk, and refuses links too far for that.
"""

from __future__ import annotations

import bisect
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from ...errors import FormatError
from .blocks import ByteMatrix, show_name, text_of
from .names import find_field_dot

if TYPE_CHECKING:
    from ...columns import IntArray
    from .headers import Link, MemberTable

# A link and what it names make one chunk; a longer one would be read whole for each of its samples.
MOST_TIED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Placed:
    """``members`` with the ``links`` that lead to a member of the table, ``lost`` those that do not.

    ``ties``: (links, 2) int64, the bytes that must be read for each, from the first header to the end of the last.
    """

    members: MemberTable
    links: Sequence[Link]
    ties: IntArray
    lost: Sequence[Link]


def place_links(members: MemberTable) -> Placed:
    """Make members of the links of a table whose content is in it, in their places.

    A hard link is followed to the latest member before it, a symbolic one to the last of that name, as unpacking would.
    """
    found: dict[int, int] = {}  # from the number of a link to that of a member
    names = [text_of(row) for row in members.names]
    known: dict[bytes, int] = {}
    row = 0
    for number, link in enumerate(members.links):
        while row < link.place:
            known[_norm(names[row])] = row
            row += 1
        target = None if link.is_symbolic else known.get(_norm(link.target))
        if target is not None:
            found[number] = known[_norm(link.name)] = target
    known.update((_norm(name), row + more) for more, name in enumerate(names[row:]))
    count = -1
    while len(found) > count:  # links to links
        count = len(found)
        for number, link in enumerate(members.links):
            target = None if number in found else known.get(_target(link))
            if target is not None:
                found[number] = target
                known.setdefault(_norm(link.name), target)
    placed = [members.links[number] for number in sorted(found)]
    rows = np.array([found[number] for number in sorted(found)], np.int64)
    places = np.array([link.place for link in placed], np.int64)
    records = np.array([link.record for link in placed], np.int64)
    stops = np.array([link.stop for link in placed], np.int64)
    ties = np.stack([np.minimum(records, members.records[rows]), np.maximum(stops, members.stops[rows])], axis=1)
    table = replace(
        members,
        records=np.insert(members.records, places, records),
        starts=np.insert(members.starts, places, members.starts[rows]),
        sizes=np.insert(members.sizes, places, members.sizes[rows]),
        stops=np.insert(members.stops, places, stops),
        names=_insert_names(members.names, places, [link.name for link in placed]),
        links=(),
    )
    lost = [link for number, link in enumerate(members.links) if number not in found]
    return Placed(table, placed, ties, lost)


def _norm(name: bytes) -> bytes:
    return posixpath.normpath(name)


def _target(link: Link) -> bytes:
    return _norm(posixpath.join(posixpath.dirname(link.name), link.target) if link.is_symbolic else link.target)


def _insert_names(names: ByteMatrix, places: IntArray, texts: Sequence[bytes]) -> ByteMatrix:
    width = max(names.shape[1], *(len(text) + 1 for text in texts)) if texts else names.shape[1]
    wide = np.zeros((len(names), width), np.uint8)
    wide[:, : names.shape[1]] = names
    new = np.zeros((len(texts), width), np.uint8)
    for row, text in enumerate(texts):
        new[row, : len(text)] = np.frombuffer(text, np.uint8)
    return np.insert(wide, places, new, axis=0)


def are_of_samples(links: Sequence[Link]) -> bool:
    """Return whether any of the links has the name of a sample's field."""
    return any(find_field_dot(link.name) >= 0 for link in links)


def doubt_lost(placed: Placed, shard: str) -> str:
    """Say which symbolic link of a sample leads to nothing in the archive, and is left out; "" where none does.

    Links to folders of the archive are no part of a sample.

    Raises:
        FormatError: a hard link does, so that the archive lacks a member.
    """
    doubt = ""
    names: list[bytes] | None = None
    for link in placed.lost:
        if find_field_dot(link.name) < 0:
            continue
        names = names or [_norm(text_of(row)) for row in placed.members.names]
        folder = _target(link) + b"/"
        if link.is_symbolic and any(name.startswith(folder) for name in names):
            continue
        kind, option = _kind(link)
        lost = (
            f"member '{show_name(link.name)}' is a {kind} link to '{show_name(link.target)}', which is not in the shard"
        )
        if not link.is_symbolic:
            raise FormatError(
                shard,
                f"{lost}, so its content is lost; write the shard with `tar {option}`, or without the link",
                offset=link.record,
            )
        doubt = doubt or f"{lost}, so it is left out; write the shard with `tar {option}` to have its content"
    return doubt


def join_tied(starts: IntArray, stops: IntArray, placed: Placed, shard: str) -> tuple[IntArray, IntArray, IntArray]:
    """Join samples that must be read together: (units,) int64 starts, stops and how many samples each has.

    ``starts`` and ``stops``: (samples,) int64, rising.

    Raises:
        FormatError: a link and what it names lie too far from each other.
    """
    nobody = [None] * len(starts)
    spans: list[tuple[int, int, Link | None]] = list(zip(starts.tolist(), stops.tolist(), nobody, strict=True))
    for tied, (start, stop) in zip(placed.links, placed.ties.tolist(), strict=True):
        if find_field_dot(tied.name) >= 0:
            spans.append((start, stop, tied))
    spans.sort(key=lambda span: span[:2])
    units: list[list[int]] = []
    for start, stop, link in spans:
        if units and start < units[-1][1]:
            units[-1][1] = max(units[-1][1], stop)
        else:
            units.append([start, stop, 0])
        units[-1][2] += link is None
    for tied, (start, _) in zip(placed.links, placed.ties.tolist(), strict=True):
        unit = units[max(0, bisect.bisect_right(units, start, key=lambda unit: unit[0]) - 1)]
        length = unit[1] - unit[0]
        if length > MOST_TIED_BYTES and unit[2] > 1 and find_field_dot(tied.name) >= 0:
            kind, option = _kind(tied)
            raise FormatError(
                shard,
                f"member '{show_name(tied.name)}' is a {kind} link to '{show_name(tied.target)}', which lies too far "
                f"from it: with other links, {length:,} bytes would be read at once, and the most is "
                f"{MOST_TIED_BYTES:,}; write the shard with `tar {option}`",
                offset=tied.record,
            )
    joined = np.array(units, np.int64).reshape(-1, 3)
    return joined[:, 0].copy(), joined[:, 1].copy(), joined[:, 2].copy()


def _kind(link: Link) -> tuple[str, str]:
    return ("symbolic", "--dereference") if link.is_symbolic else ("hard", "--hard-dereference")
