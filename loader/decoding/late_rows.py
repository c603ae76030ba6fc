"""Rows of arrays that are copied when their batch is due, on a thread of the pool and into memory of the batch.

Until then it is only known where they lie. What is copied goes through tiles that stay in a core's cache.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self

import numpy as np

from ..columns import AnyArray, IntArray, Records, join_slices
from ..order.spans import ChunkRows
from ..reading.records import fill_columns
from .batch_memory import BatchMemory, new_array
from .decode import FieldDecoders

_TILE_BYTES = 256 << 10


class LateFields(Protocol):
    """Some fields of n rows. ``nbytes`` is what they take once they are made."""

    @property
    def nbytes(self) -> int: ...

    def cut(self, start: int, stop: int) -> Self: ...

    def pick(self, rows: IntArray) -> Self: ...

    def make(self, memory: BatchMemory | None) -> Mapping[str, AnyArray]:
        """The fields: arrays (n, ...) of their own, of ``memory`` if that is given."""


class WideRows:
    """One field's wide rows: row i is the bytes of ``sources[origins[i]]`` from ``starts[i]`` on.

    They are joined as bytes, a tile at a time: numpy would release the GIL for each row, and wait for it again, while
    others have it.
    """

    def __init__(
        self,
        name: str,
        like: AnyArray,
        dtype: np.dtype[Any],
        sources: list[memoryview],
        origins: IntArray,
        starts: IntArray,
    ) -> None:
        """``like`` (any, ...): rows of this shape and dtype; ``dtype`` is the one to hand them out in."""
        self._name, self._like, self._dtype = name, like, dtype
        self._sources, self._origins, self._starts = sources, origins, starts

    @property
    def _row_bytes(self) -> int:
        return self._like.itemsize * math.prod(self._like.shape[1:])

    @property
    def nbytes(self) -> int:
        return len(self._starts) * math.prod(self._like.shape[1:]) * self._dtype.itemsize

    def cut(self, start: int, stop: int) -> WideRows:
        return self._with(self._origins[start:stop], self._starts[start:stop])

    def pick(self, rows: IntArray) -> WideRows:
        return self._with(self._origins[rows], self._starts[rows])

    def _with(self, origins: IntArray, starts: IntArray) -> WideRows:
        return WideRows(self._name, self._like, self._dtype, self._sources, origins, starts)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        shape, size = self._like.shape[1:], self._row_bytes
        out = new_array(memory, (len(self._starts), *shape), self._dtype)
        tile = max(1, _TILE_BYTES // size)
        for start in range(0, len(out), tile):
            origins, starts = self._origins[start : start + tile].tolist(), self._starts[start : start + tile].tolist()
            slices = [self._sources[i][at : at + size] for i, at in zip(origins, starts, strict=True)]
            rows = join_slices(slices, self._like.dtype)
            out[start : start + tile] = rows.reshape(-1, *shape)
        return {self._name: out}


class WideRowsOfSpan:
    """Collects where one field's wide rows lie, chunk by chunk."""

    def __init__(self, like: AnyArray, num_rows: int) -> None:
        self._like: AnyArray = np.empty((0, *like.shape[1:]), like.dtype)
        self._sources: list[memoryview] = []
        self._origins: IntArray = np.zeros(num_rows, np.int64)
        self._starts: IntArray = np.zeros(num_rows, np.int64)

    def add(self, source: AnyArray, group: ChunkRows) -> None:
        """The rows of ``group``; ``source`` is (samples, ...) of a dtype that may differ from the first one's."""
        rows = group.rows
        if source.dtype != self._like.dtype or not _has_whole_rows(source):
            source, rows = np.ascontiguousarray(source[rows], self._like.dtype), np.arange(len(rows))
        self._origins[group.targets] = len(self._sources)
        self._starts[group.targets] = rows * source.strides[0]
        self._sources.append(_bytes_of(source))

    def rows(self, name: str, decoders: FieldDecoders) -> WideRows:
        dtype = decoders.dtype_of(self._like)
        return WideRows(name, self._like, dtype, self._sources, self._origins, self._starts)


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


def _has_whole_rows(source: AnyArray) -> bool:
    """Whether each row's values lie side by side, and rows one behind another, with gaps or overlaps perhaps."""
    return source[:1].flags.c_contiguous and source.strides[0] >= 0


def _bytes_of(source: AnyArray) -> memoryview:
    """All bytes of rows that ``_has_whole_rows`` is true of, from the first one's on."""
    first: AnyArray = source[:1].reshape(-1).view(np.uint8)
    length = (len(source) - 1) * source.strides[0] + first.nbytes
    flat: Any = np.lib.stride_tricks.as_strided(first, (length,), (1,), writeable=False)
    return memoryview(flat)
