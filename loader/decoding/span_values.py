"""Collectors of a field's values: stored chunk by chunk in the order of arrival, and put in order at the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ..columns import AnyArray, IntArray, Ragged

if TYPE_CHECKING:
    from ..order.spans import ChunkRows


class ArrayOfSpan:
    """Collects rows of one shape by copying them."""

    def __init__(self, like: AnyArray, num_rows: int, dtype: np.dtype[Any]) -> None:
        """Make room for rows of ``like``'s shape, to be handed out in ``dtype``."""
        self._values: AnyArray = np.empty((num_rows, *like.shape[1:]), dtype)

    def add(self, source: AnyArray, rows: IntArray, arrived: int) -> None:
        """Add some rows of ``source``, after ``arrived`` others."""
        # numpy's take would first copy all of an array that is not contiguous
        taken = source.take(rows, axis=0) if source.flags.c_contiguous else source[rows]
        self._values[arrived : arrived + len(rows)] = taken

    def finish(self, order: IntArray) -> AnyArray:
        """Put all rows in order: row i is the ``order[i]``-th that arrived."""
        return self._values.take(order, axis=0)


class ListOfSpan:
    """Collects Python values; ``so_far`` are those in the order of arrival, up to the last that was added."""

    def __init__(self) -> None:
        self.so_far: list[Any] = []

    def pad(self, count: int) -> None:
        """Add missing values until there are ``count``: earlier chunks had no such field."""
        self.so_far.extend([None] * (count - len(self.so_far)))

    def add(self, values: list[Any], arrived: int) -> None:
        """Add values of rows that come after ``arrived`` others."""
        self.pad(arrived)
        self.so_far.extend(values)

    def finish(self, order: IntArray) -> list[Any]:
        """Put all values in order: value i is that of the ``order[i]``-th row that arrived."""
        self.pad(len(order))
        return list(map(self.so_far.__getitem__, order.tolist()))


class RaggedOfSpan:
    """Collects lists of integers, without a Python object a value, where they lie in chunks."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Ragged, ChunkRows]] = []
        self.count = 0

    def add(self, arrays: Ragged, group: ChunkRows, arrived: int) -> None:
        """Add the rows of ``group``, after ``arrived`` others."""
        self._parts.append((arrived, arrays, group))
        self.count += len(group.rows)

    def finish(self) -> Ragged:
        """Join all ``count`` values, where no row lacks its own."""
        return Ragged.merge(self.count, [(group.targets, arrays, group.rows) for _, arrays, group in self._parts])

    def put_into(self, listed: ListOfSpan, num_rows: int) -> None:
        """Put them into the places of their rows, among values that are missing or no lists of integers."""
        listed.pad(num_rows)
        for arrived, arrays, group in self._parts:
            listed.so_far[arrived : arrived + len(group.rows)] = map(arrays.__getitem__, group.rows.tolist())
