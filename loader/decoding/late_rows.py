"""Rows of arrays that are copied when their batch is due, on a thread of the pool and into memory of the batch.

Until then only their places are known. Copies go through tiles that stay in a core's cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ..columns import fill_columns
from ..reading.mapped import MappedFile, looking_at
from .batch_memory import BatchMemory, new_array

if TYPE_CHECKING:
    from ..columns import AnyArray, IntArray, Records
    from ..order.spans import ChunkRows


_TILE_BYTES = 1 << 20
# Of so many batches, or bytes of them, rows are copied at once: with each call numpy gives Python's lock away, and then
# waits for it. No more, since who keeps one of these batches keeps the memory of all.
MOST_TOGETHER, TOGETHER_BYTES = 4, 4 << 20
_MOST_BYTES = np.iinfo(np.intp).max  # of an array


class LateFields(Protocol):
    """Some fields of n rows. ``nbytes`` is their size once they are made.

    ``is_mapped``: they lie in files, so that they need no memory before. ``at``: where rows of arrays lie; None of
    Python values.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def is_mapped(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def at(self) -> RowsAt | None: ...

    def cut(self, start: int, stop: int) -> Self: ...

    def pick(self, rows: IntArray) -> Self: ...

    def mapped(self) -> Sequence[MappedFile]:
        """List the files that ``make`` copies from; to be called by a thread that is ``looking_at`` them."""

    def make(self, memory: BatchMemory | None) -> Mapping[str, AnyArray | list[Any]]:
        """Make the fields: arrays (n, ...) of their own, of ``memory`` if that is given, or lists of n."""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows that lie in chunks: row i is ``rows[places[i]]``, of an array on the memory of ``sources``.

    So one call of numpy copies a tile of rows from many chunks, without the GIL. Calls for each row would wait for it
    again and again, while other threads have it. Where sources are mapped, row i lies in ``files[origins[i]]``.
    """

    rows: AnyArray
    places: IntArray
    sources: Sequence[AnyArray] = ()
    origins: IntArray | None = None
    files: Sequence[MappedFile | None] = ()

    def __len__(self) -> int:
        return len(self.places)

    def pick(self, rows: IntArray | slice) -> RowsAt:
        origins = None if self.origins is None else self.origins[rows]
        return RowsAt(self.rows, self.places[rows], self.sources, origins, self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows where they lie."""
        return len(self.places) * math.prod(self.rows.shape[1:]) * self.rows.itemsize

    def mapped(self) -> list[MappedFile]:
        """List the files that these rows are mapped from."""
        found = [] if self.origins is None else map(self.files.__getitem__, set(self.origins.tolist()))
        return [file for file in found if file is not None]


class WideRows:
    """One field's wide rows."""

    is_mapped = False

    def __init__(self, name: str, at: RowsAt, dtype: np.dtype[Any]) -> None:
        """Keep rows to be handed out in ``dtype``."""
        self._name, self.at, self._dtype = name, at, dtype

    @property
    def names(self) -> Sequence[str]:
        return (self._name,)

    @property
    def nbytes(self) -> int:
        return len(self.at) * math.prod(self.at.rows.shape[1:]) * self._dtype.itemsize

    def cut(self, start: int, stop: int) -> WideRows:
        return WideRows(self._name, self.at.pick(slice(start, stop)), self._dtype)

    def pick(self, rows: IntArray) -> WideRows:
        return WideRows(self._name, self.at.pick(rows), self._dtype)

    def mapped(self) -> list[MappedFile]:
        return self.at.mapped()

    def is_like(self, other: WideRows) -> bool:
        """Return whether both are rows of one span's field."""
        return self._name == other._name and self.at.rows is other.at.rows and self._dtype == other._dtype

    @staticmethod
    def join(parts: Sequence[WideRows]) -> WideRows:
        """Join alike rows, one after another; the parts hold the sources."""
        first = parts[0]
        places = np.concatenate([part.at.places for part in parts])
        return WideRows(first._name, RowsAt(first.at.rows, places), first._dtype)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        rows, places = self.at.rows, self.at.places
        shape = rows.shape[1:]
        out = new_array(memory, (len(places), *shape), self._dtype)
        tile = max(1, _TILE_BYTES // (rows.itemsize * math.prod(shape)))
        for start in range(0, len(out), tile):
            out[start : start + tile] = rows[places[start : start + tile]]
        return {self._name: out}


def make_all(parts: Sequence[Sequence[LateFields]], memory: BatchMemory | None) -> list[dict[str, Any]]:
    """Make the fields of several batches, wide rows of neighbours in one piece of memory, as far as that is small."""
    made: list[dict[str, Any]] = [{} for _ in parts]
    start = 0
    while start < len(parts):
        stop = start + _count_together(parts[start:])
        for of_field in zip(*parts[start:stop], strict=True):
            for fields, values in zip(made[start:stop], _make_together(of_field, memory), strict=True):
                fields.update(values)
        start = stop
    return made


def _count_together(parts: Sequence[Sequence[LateFields]]) -> int:
    """Count the first batches whose fields are made together."""
    if len(parts) == 1 or not all(isinstance(each, WideRows) for each in parts[0]):
        return 1
    count = nbytes = 0
    for late in islice(parts, MOST_TOGETHER):
        nbytes += sum(each.nbytes for each in late)
        are_alike = len(late) == len(parts[0]) and all(map(_are_alike, parts[0], late))
        if count and (nbytes > TOGETHER_BYTES or not are_alike):
            break
        count += 1
    return count


def _are_alike(one: LateFields, other: LateFields) -> bool:
    return isinstance(one, WideRows) and isinstance(other, WideRows) and one.is_like(other)


def _make_together(of_field: Sequence[LateFields], memory: BatchMemory | None) -> Iterator[Mapping[str, Any]]:
    first, *others = of_field
    if not others:
        yield first.make(memory)
        return
    wide = [late for late in of_field if isinstance(late, WideRows)]
    [(name, rows)] = WideRows.join(wide).make(memory).items()
    stops = list(accumulate(len(late.at) for late in wide))
    yield from ({name: rows[start:stop]} for start, stop in pairwise([0, *stops]))


class RecordRows:
    """Fields that lie in chunks as records."""

    is_mapped = False

    def __init__(self, records: Records, at: RowsAt, dtypes: Sequence[np.dtype[Any]]) -> None:
        """Keep rows laid out as ``records`` says, whose fields are handed out in ``dtypes``."""
        self._records, self.at, self._dtypes = records, at, dtypes

    @property
    def names(self) -> Sequence[str]:
        return self._records.names

    @property
    def nbytes(self) -> int:
        return len(self.at) * sum(dtype.itemsize for dtype in self._dtypes)

    def cut(self, start: int, stop: int) -> RecordRows:
        return RecordRows(self._records, self.at.pick(slice(start, stop)), self._dtypes)

    def pick(self, rows: IntArray) -> RecordRows:
        return RecordRows(self._records, self.at.pick(rows), self._dtypes)

    def mapped(self) -> list[MappedFile]:
        return self.at.mapped()

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        records, width = self._records, len(self._records.names)
        unit = np.dtype(f"u{self.at.rows.itemsize // width}")
        columns = new_array(memory, (width, len(self.at)), unit)
        fill_columns(columns, self.at.rows, self.at.places)
        fields: dict[str, AnyArray] = {}
        for name, dtype, wanted, column in zip(records.names, records.dtypes, self._dtypes, columns, strict=True):
            values = column.view(dtype)
            fields[name] = values if dtype is wanted else values.astype(wanted, copy=False)
        return fields


class RowsOfSpan:
    """Collects where rows of one shape lie, chunk by chunk."""

    def __init__(self, like: AnyArray, num_rows: int) -> None:
        self._like: AnyArray = np.empty((0, *like.shape[1:]), like.dtype)
        self._num_rows = num_rows
        self._parts: list[_Part] = []

    def add(self, source: AnyArray, group: ChunkRows, file: MappedFile | None = None) -> None:
        """Add the rows of ``group``; ``source`` is (samples, ...) of a dtype that may differ from the first one's.

        ``file``: the one that it is mapped from.
        """
        part = _Part(source, group.rows, group.targets, file)
        if source.dtype != self._like.dtype or source.strides[0] < 0 or not source[:1].flags.c_contiguous:
            part = part.copy(self._like.dtype)
        self._parts.append(part)

    def finish(self) -> RowsAt:
        """Collect all rows. Those that no group gave, of chunks without the field, are arbitrary."""
        return self._span() or self._copy()

    def _span(self) -> RowsAt | None:
        """Find places in one array of rows that begins with the lowest source and spans all.

        Its rows overlap, so that one begins wherever one of a source does, and lie between the sources, too, where
        memory may belong to others: only rows at the places may be read, while the sources are held. None where it
        would be larger than numpy allows.
        """
        starts: list[int] = [part.source.__array_interface__["data"][0] for part in self._parts]
        first = min(starts)
        lowest = self._parts[starts.index(first)]
        # The largest step in which each row begins.
        widths = (part.source.strides[0] for part in self._parts)
        step = math.gcd(*(start - first for start in starts), *widths) or 1
        places = np.zeros(self._num_rows, np.int64)
        for start, part in zip(starts, self._parts, strict=True):
            places[part.targets] = part.rows * (part.source.strides[0] // step) + (start - first) // step
        count = int(places.max()) + 1
        if count * max(1, lowest.source[:1].nbytes) > _MOST_BYTES:
            return None
        shape, strides = (count, *lowest.source.shape[1:]), (step, *lowest.source.strides[1:])
        spanning = np.lib.stride_tricks.as_strided(lowest.source, shape, strides, writeable=False)
        return RowsAt(spanning, places, [part.source for part in self._parts], *self._files(lowest.file))

    def _files(self, default: MappedFile | None) -> tuple[IntArray | None, list[MappedFile | None]]:
        """Find the file in which each row lies; ``default`` is that of rows that no group has given."""
        numbers = {file: number for number, file in enumerate(dict.fromkeys([default, *(p.file for p in self._parts)]))}
        if list(numbers) == [None]:
            return None, []
        origins = np.zeros(self._num_rows, np.int64)
        for part in self._parts:
            origins[part.targets] = numbers[part.file]
        return origins, list(numbers)

    def _copy(self) -> RowsAt:
        """Copy the rows into memory of their own, in order."""
        copied: AnyArray = np.empty((self._num_rows, *self._like.shape[1:]), self._like.dtype)
        for part in self._parts:
            copied[part.targets] = part.copy(self._like.dtype).source
        return RowsAt(copied, np.arange(self._num_rows))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of ``source``, and where they belong."""

    source: AnyArray
    rows: IntArray
    targets: IntArray
    file: MappedFile | None

    def copy(self, dtype: np.dtype[Any]) -> _Part:
        """Copy the rows into memory of their own, in order."""
        with looking_at([] if self.file is None else [self.file], len(self.rows)):
            copied = np.ascontiguousarray(self.source[self.rows], dtype)
        return _Part(copied, np.arange(len(copied)), self.targets, None)
