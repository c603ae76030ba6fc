"""Goes through a small, plain archive header by header, in a fraction of the time that arrays take for a few rows.

It knows the plainest form alone: regular files with POSIX headers and short names, cut into samples without a question,
whole, and zeros at the end. For anything else the caller takes the full census, which explains errors.
"""

from __future__ import annotations

import numpy as np

from .blocks import BLOCK
from .census import Census
from .names import RESERVED_FIELDS, find_field_dot

# Up to about this many members a loop is faster than arrays.
MOST_MEMBERS = 32

_REGULAR = (0, ord("0"))
_ENDS = (0, ord(" "))


def take_small_census(archive: memoryview) -> Census | None:
    """Return the ``take_census`` of a whole archive; None if it has many members or is not of the plainest form."""
    starts: list[int] = []
    stops: list[int] = []
    every: set[str] = set()
    fields: set[str] = set()
    key: bytes | None = None
    keys: set[bytes] = set()
    at = 0
    for _ in range(MOST_MEMBERS + 1):
        header = bytes(archive[at : at + BLOCK])
        if len(header) < BLOCK:
            return None
        if not header[0]:
            break
        found = _read_header(header)
        if found is None:
            return None
        name, size = found
        dot = find_field_dot(name)
        if dot < 0:
            return None
        field = name[dot + 1 :].decode("ascii").lower()
        if name[:dot] != key:
            key = name[:dot]
            if key in keys:
                return None
            keys.add(key)
            starts.append(at)
            stops.append(0)
            fields = set()
        if field in fields:
            return None
        fields.add(field)
        every.add(field)
        at += BLOCK
        stops[-1] = at + size
        at += -(-size // BLOCK) * BLOCK
    else:
        return None
    if not every or not every.isdisjoint(RESERVED_FIELDS) or bytes(archive[at:]).strip(b"\0"):
        return None
    return Census(np.array(starts, np.int64), np.array(stops, np.int64), frozenset(every), len(archive))


def _read_header(header: bytes) -> tuple[bytes, int] | None:
    """Name and size of a regular file whose header is sound and has no prefix."""
    size, checksum = header[124:135], header[148:154]
    if (
        header[257:262] != b"ustar"
        or header[345]
        or header[156] not in _REGULAR
        or header[135] not in _ENDS
        or header[154] not in _ENDS
        or not (size.isdigit() and checksum.isdigit())
        or b"8" in size + checksum
        or b"9" in size + checksum
        or sum(header) - sum(header[148:156]) + 8 * 32 != int(checksum, 8)
    ):
        return None
    name = header[:100].partition(b"\0")[0]
    if name.endswith(b"/") or not name.isascii():
        return None
    return name, int(size, 8)
