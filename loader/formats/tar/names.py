"""From member names to samples, by the rules of the WebDataset format: key, dot, field.

``find_field_dot`` is the rule for one name; ``group_names`` applies it to a table of names at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from ...columns import KEY_COLUMN, AnyArray, IntArray

if TYPE_CHECKING:
    from .blocks import ByteMatrix

# webdataset stores these beside the fields, and treats a member of that name as a duplicate.
RESERVED_FIELDS = frozenset({KEY_COLUMN, "__url__"})

_SLASH, _DOT, _UNDERSCORE, _NEWLINE = b"/._\n"


@dataclass(frozen=True, slots=True)
class NameTable:
    """The members that belong to samples, in order.

    (kept,) int64: ``members`` the rows of the table of names, ``dots`` the lengths of their keys, ``rows`` the ordinals
    of their samples, ``codes`` the indexes of their fields in ``fields``. ``names`` is (kept, width) uint8.
    """

    members: IntArray
    names: ByteMatrix
    dots: IntArray
    rows: IntArray
    codes: IntArray
    fields: list[str]

    @property
    def samples(self) -> int:
        return int(self.rows[-1]) + 1 if len(self.rows) else 0

    def key(self, index: int) -> bytes:
        return self.names[index, : self.dots[index]].tobytes()

    def name(self, index: int) -> str:
        name: bytes = self.names[index].tobytes().split(b"\0", 1)[0]
        return name.decode("utf-8", "backslashreplace")


def find_field_dot(name: bytes) -> int:
    """Find the dot between key and field: the first one of the base name that has something before it.

    -1 for a member that is no part of a sample: no dot, or a top folder or file named ``__...__``. A base name that
    starts with a dot has the folder as its key, where the folder's name has no dot.
    """
    top = name.partition(b"/")[0]
    if b"/" not in name:
        top = top.removesuffix(b"\n")
    if len(top) >= 4 and top.startswith(b"__") and top.endswith(b"__"):
        return -1
    line = name.partition(b"\n")[0]
    head = line.rfind(b"/") + 1
    while True:
        dot = name.find(b".", head)
        if dot > head and name.find(b"/", dot) < 0:
            return dot
        if head == 0:
            return -1
        head = name.rfind(b"/", 0, head - 1) + 1


def group_names(names: ByteMatrix) -> NameTable:
    """Cut members into samples: a run of members with one key is one sample. Fields are lower-cased.

    ``names`` is (members, width) uint8, NUL-padded, the last column all NUL.
    """
    count, width = names.shape
    lengths = (names == 0).argmax(axis=1)
    if int(np.count_nonzero(names)) != int(lengths.sum()):
        # Left-overs after the NUL, as some writers leave them.
        names = np.where(np.arange(width) < lengths[:, None], names, np.uint8(0))
    bases = _first_after_last_slash(names, width)
    is_dot = names == _DOT
    if bases.any():
        is_dot &= np.arange(width) >= bases[:, None]
    dots = is_dot.argmax(axis=1)
    kept = is_dot[np.arange(count), dots]
    odd = (kept & (dots == bases)) | ((names[:, 0] == _UNDERSCORE) & (names[:, 1] == _UNDERSCORE))
    odd |= (names == _NEWLINE).any(axis=1)
    for index in np.flatnonzero(odd).tolist():
        dot = find_field_dot(names[index, : lengths[index]].tobytes())
        kept[index] = dot >= 0
        dots[index] = dot
    members = np.flatnonzero(kept)
    if len(members) < count:
        names, dots, lengths = names[members], dots[members], lengths[members]
    fields, codes = _fields(names, dots, lengths)
    starts_sample = ~_continues(names, dots)
    return NameTable(members, names, dots, np.cumsum(starts_sample) - 1, codes, fields)


def hash_keys(names: ByteMatrix, dots: IntArray) -> AnyArray:
    """(names,) uint64: a number for each key, equal for equal ones, and hardly ever for others, in any table."""
    width = int(dots.max(initial=0))
    words = -(-width // 8)
    padded = np.zeros((len(names), 8 * words), np.uint8)
    np.multiply(names[:, :width], np.arange(width) < dots[:, None], out=padded[:, :width])
    mixed = padded.view("<u8") * _factors(words)
    sums: AnyArray = (mixed ^ (mixed >> np.uint64(32))).sum(axis=1, dtype=np.uint64)
    return sums


@cache
def _factors(words: int) -> AnyArray:
    """Odd numbers; the first ones are the same however many."""
    return np.random.default_rng(0).integers(0, 1 << 63, words, np.uint64) * np.uint64(2) + np.uint64(1)


def _first_after_last_slash(names: ByteMatrix, width: int) -> IntArray:
    is_slash = names == _SLASH
    if not is_slash.any():
        return np.zeros(len(names), np.int64)
    back = is_slash[:, ::-1].argmax(axis=1)
    return np.where(is_slash[np.arange(len(names)), width - 1 - back], width - back, 0)


def _continues(names: ByteMatrix, dots: IntArray) -> AnyArray:
    """(kept,) bool: the member has the key of the one before it."""
    continues = np.zeros(len(names), bool)
    differs = names[1:] != names[:-1]
    first = differs.argmax(axis=1)
    equal = ~differs[np.arange(len(differs)), first]
    continues[1:] = (dots[1:] == dots[:-1]) & (equal | (first >= dots[1:]))
    return continues


def _fields(names: ByteMatrix, dots: IntArray, lengths: IntArray) -> tuple[list[str], IntArray]:
    """The distinct fields, and each member's index into them."""
    count, width = names.shape
    if count == 0:
        return [], np.zeros(0, np.int64)
    longest = int((lengths - dots).max()) - 1
    # Endings of up to 8 bytes are compared as one integer. Past the name's end there is only NUL.
    padded = 8 if longest <= 8 else longest
    columns = np.minimum(dots[:, None] + np.arange(1, padded + 1), width - 1)
    endings = np.take_along_axis(names, columns, axis=1)
    raw, raw_codes = np.unique(endings.view("<u8" if padded == 8 else f"S{padded}").ravel(), return_inverse=True)
    fields: dict[str, int] = {}
    recode = np.zeros(len(raw), np.int64)
    for code, ending in enumerate(raw):
        text = ending.tobytes().split(b"\0", 1)[0].decode("utf-8", "backslashreplace").lower()
        recode[code] = fields.setdefault(text, len(fields))
    return list(fields), recode[raw_codes]
