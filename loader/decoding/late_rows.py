"""Rows of arrays that are copied when their batch is due, on a thread of the pool and into memory of the batch.

Until then it is only known where they lie. What is copied goes through tiles that stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from ..columns import AnyArray, IntArray, Records
from ..order.spans import ChunkRows
from ..reading.records import fill_columns
from .batch_memory import BatchMemory, new_array
from .decode import FieldDecoders

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


class WideRows:
    """One field's wide rows: row i is ``rows[places[i]]`` of an array that spans all chunks.

    So one call of numpy copies a tile of rows from many chunks, without the GIL. Calls for each row would wait for it
    again and again, while other threads have it.
    """

    def __init__(
        self, name: str, rows: AnyArray, places: IntArray, dtype: np.dtype[Any], sources: Sequence[AnyArray]
    ) -> None:
        """``rows`` (any, ...) lies on the memory of ``sources``; ``dtype`` is the one to hand the rows out in."""
        self._name, self._rows, self._places, self._dtype, self._sources = name, rows, places, dtype, sources

    @property
    def nbytes(self) -> int:
        return len(self._places) * math.prod(self._rows.shape[1:]) * self._dtype.itemsize

    def cut(self, start: int, stop: int) -> WideRows:
        return WideRows(self._name, self._rows, self._places[start:stop], self._dtype, self._sources)

    def pick(self, rows: IntArray) -> WideRows:
        return WideRows(self._name, self._rows, self._places[rows], self._dtype, self._sources)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        shape = self._rows.shape[1:]
        out = new_array(memory, (len(self._places), *shape), self._dtype)
        tile = max(1, _TILE_BYTES // (self._rows.itemsize * math.prod(shape)))
        for start in range(0, len(out), tile):
            out[start : start + tile] = self._rows[self._places[start : start + tile]]
        return {self._name: out}


class WideRowsOfSpan:
    """Collects where one field's wide rows lie, chunk by chunk."""

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

    def rows(self, name: str, decoders: FieldDecoders) -> WideRows:
        """All rows. Those that no group has given, of chunks without the field, mean nothing."""
        sources = [source for source, _, _ in self._parts]
        found = self._span() or self._copy()
        return WideRows(name, *found, decoders.dtype_of(self._like), sources)

    def _span(self) -> tuple[AnyArray, IntArray] | None:
        """An array of rows that begins with the lowest source and spans all, and the places of rows in it, (n,).

        Its rows overlap, so that one begins wherever one of a source does, and lie between the sources, too, where
        memory may be anybody's: only those at the places may be read, while somebody holds the sources. None where it
        would be larger than numpy allows.
        """
        starts: list[int] = [source.__array_interface__["data"][0] for source, _, _ in self._parts]
        first = min(starts)
        lowest = self._parts[starts.index(first)][0]
        offsets = np.zeros(self._num_rows, np.int64)
        for start, (source, rows, targets) in zip(starts, self._parts, strict=True):
            offsets[targets] = rows * source.strides[0] + (start - first)
        bits = int(np.bitwise_or.reduce(offsets))
        step = bits & -bits or 1  # the largest power of two that divides all
        places: IntArray = offsets // step
        count = int(places.max()) + 1
        if count * max(1, lowest[:1].nbytes) > _MOST_BYTES:
            return None
        strides = (step, *lowest.strides[1:])
        return np.lib.stride_tricks.as_strided(lowest, (count, *lowest.shape[1:]), strides, writeable=False), places

    def _copy(self) -> tuple[AnyArray, IntArray]:
        """The rows in memory of their own, in order."""
        copied: AnyArray = np.empty((self._num_rows, *self._like.shape[1:]), self._like.dtype)
        for source, rows, targets in self._parts:
            copied[targets] = source[rows]
        return copied, np.arange(self._num_rows)


class RecordRows:
    """Fields whose rows were taken from chunks as records: row i is ``taken[order[i]]``."""

    def __init__(self, records: Records, taken: AnyArray, order: IntArray, dtypes: Sequence[np.dtype[Any]]) -> None:
        """``dtypes``: those to hand the fields out in."""
        self._records, self._taken, self._order, self._dtypes = records, taken, order, dtypes

    @property
    def nbytes(self) -> int:
        return len(self._order) * sum(dtype.itemsize for dtype in self._dtypes)

    def cut(self, start: int, stop: int) -> RecordRows:
        return RecordRows(self._records, self._taken, self._order[start:stop], self._dtypes)

    def pick(self, rows: IntArray) -> RecordRows:
        return RecordRows(self._records, self._taken, self._order[rows], self._dtypes)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        records, width = self._records, len(self._records.names)
        unit = np.dtype(f"u{self._taken.itemsize // width}")
        columns = new_array(memory, (width, len(self._order)), unit)
        fill_columns(columns, self._taken, self._order)
        stored = zip(records.names, records.dtypes, self._dtypes, columns, strict=True)
        return {name: column.view(dtype).astype(wanted, copy=False) for name, dtype, wanted, column in stored}
