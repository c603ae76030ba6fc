"""Rows of arrays that are copied when their batch is due, on a thread of the pool and into memory of the batch.

Until then it is only known where they lie. What is copied goes through tiles that stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import numpy as np

from ..columns import AnyArray, IntArray, Records
from ..order.spans import ChunkRows
from ..reading.records import fill_columns
from .batch_memory import BatchMemory, new_array

_TILE_BYTES = 256 << 10
_MOST_BYTES = np.iinfo(np.intp).max  # of an array


class LateFields(Protocol):
    """Some fields of n rows. ``nbytes`` is what they take once they are made."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, start: int, stop: int) -> Self: ...

    def pick(self, rows: IntArray) -> Self: ...

    def make(self, memory: BatchMemory | None) -> Mapping[str, AnyArray]:
        """The fields: arrays (n, ...) of their own, of ``memory`` if that is given."""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows that lie in chunks: row i is ``rows[places[i]]``, of an array on the memory of ``sources``.

    So one call of numpy copies a tile of rows from many chunks, without the GIL. Calls for each row would wait for it
    again and again, while other threads have it.
    """

    rows: AnyArray
    places: IntArray
    sources: Sequence[AnyArray] = ()

    def __len__(self) -> int:
        return len(self.places)

    def pick(self, rows: IntArray | slice) -> RowsAt:
        return replace(self, places=self.places[rows])


class WideRows:
    """One field's wide rows."""

    def __init__(self, name: str, at: RowsAt, dtype: np.dtype[Any]) -> None:
        """``dtype`` is the one to hand the rows out in."""
        self._name, self._at, self._dtype = name, at, dtype

    @property
    def nbytes(self) -> int:
        return len(self._at) * math.prod(self._at.rows.shape[1:]) * self._dtype.itemsize

    def cut(self, start: int, stop: int) -> WideRows:
        return WideRows(self._name, self._at.pick(slice(start, stop)), self._dtype)

    def pick(self, rows: IntArray) -> WideRows:
        return WideRows(self._name, self._at.pick(rows), self._dtype)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        rows, places = self._at.rows, self._at.places
        shape = rows.shape[1:]
        out = new_array(memory, (len(places), *shape), self._dtype)
        tile = max(1, _TILE_BYTES // (rows.itemsize * math.prod(shape)))
        for start in range(0, len(out), tile):
            out[start : start + tile] = rows[places[start : start + tile]]
        return {self._name: out}


class RecordRows:
    """Fields that lie in chunks as records."""

    def __init__(self, records: Records, at: RowsAt, dtypes: Sequence[np.dtype[Any]]) -> None:
        """``records`` tells what a row consists of, ``dtypes`` are those to hand the fields out in."""
        self._records, self._at, self._dtypes = records, at, dtypes

    @property
    def nbytes(self) -> int:
        return len(self._at) * sum(dtype.itemsize for dtype in self._dtypes)

    def cut(self, start: int, stop: int) -> RecordRows:
        return RecordRows(self._records, self._at.pick(slice(start, stop)), self._dtypes)

    def pick(self, rows: IntArray) -> RecordRows:
        return RecordRows(self._records, self._at.pick(rows), self._dtypes)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        records, width = self._records, len(self._records.names)
        unit = np.dtype(f"u{self._at.rows.itemsize // width}")
        columns = new_array(memory, (width, len(self._at)), unit)
        fill_columns(columns, self._at.rows, self._at.places)
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
        self._parts: list[tuple[AnyArray, IntArray, IntArray]] = []  # sources, their rows, and where those belong

    def add(self, source: AnyArray, group: ChunkRows) -> None:
        """The rows of ``group``; ``source`` is (samples, ...) of a dtype that may differ from the first one's."""
        rows = group.rows
        if source.dtype != self._like.dtype or source.strides[0] < 0 or not source[:1].flags.c_contiguous:
            source, rows = np.ascontiguousarray(source[rows], self._like.dtype), np.arange(len(rows))
        self._parts.append((source, rows, group.targets))

    def finish(self) -> RowsAt:
        """All rows. Those that no group has given, of chunks without the field, mean nothing."""
        return self._span() or self._copy()

    def _span(self) -> RowsAt | None:
        """Places in an array of rows that begins with the lowest source and spans all.

        Its rows overlap, so that one begins wherever one of a source does, and lie between the sources, too, where
        memory may be anybody's: only those at the places may be read, while somebody holds the sources. None where it
        would be larger than numpy allows.
        """
        starts: list[int] = [source.__array_interface__["data"][0] for source, _, _ in self._parts]
        first = min(starts)
        lowest = self._parts[starts.index(first)][0]
        # The largest step in which each row begins.
        step = math.gcd(*(start - first for start in starts), *(source.strides[0] for source, _, _ in self._parts)) or 1
        places = np.zeros(self._num_rows, np.int64)
        for start, (source, rows, targets) in zip(starts, self._parts, strict=True):
            places[targets] = rows * (source.strides[0] // step) + (start - first) // step
        count = int(places.max()) + 1
        if count * max(1, lowest[:1].nbytes) > _MOST_BYTES:
            return None
        shape, strides = (count, *lowest.shape[1:]), (step, *lowest.strides[1:])
        spanning = np.lib.stride_tricks.as_strided(lowest, shape, strides, writeable=False)
        return RowsAt(spanning, places, [source for source, _, _ in self._parts])

    def _copy(self) -> RowsAt:
        """The rows in memory of their own, in order."""
        copied: AnyArray = np.empty((self._num_rows, *self._like.shape[1:]), self._like.dtype)
        for source, rows, targets in self._parts:
            copied[targets] = source[rows]
        return RowsAt(copied, np.arange(self._num_rows))
