"""The ids of a subset's samples as a sequence that is computed, not stored."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import overload

import numpy as np

from ..columns import IntArray
from ..order.selecting.selection import Selection


class SelectedIds(Sequence[int]):
    """The sample ids of a selection in increasing order, each once, or some of them; O(chunks) memory.

    ``places`` are the ordinals in the whole sequence that this one has. Any thread may use it.
    """

    def __init__(self, selection: Selection, places: range | None = None) -> None:
        self._selection = selection
        self._places = range(int(selection.counts.sum())) if places is None else places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> SelectedIds: ...
    def __getitem__(self, index: int | slice) -> int | SelectedIds:
        if isinstance(index, slice):
            return SelectedIds(self._selection, self._places[index])
        return self._selection.id_at(self._places[operator.index(index)])

    def __iter__(self) -> Iterator[int]:
        return map(self._selection.id_at, self._places)

    def array(self) -> IntArray:
        """(len,) int64: all of them; O(samples) memory."""
        places = self._places
        return self._selection.all_ids()[np.arange(places.start, places.stop, places.step, dtype=np.int64)]

    def __contains__(self, sample_id: object) -> bool:
        try:
            self.index(sample_id)
        except ValueError:
            return False
        return True

    def index(self, sample_id: object, start: int = 0, stop: int | None = None) -> int:
        """Where a sample id is; raises ValueError if it is not in the sequence."""
        if isinstance(sample_id, int | np.integer):
            place = self._selection.place_of(int(sample_id))
            if place is not None:
                return range(len(self))[start:stop].index(self._places.index(place)) + start
        raise ValueError(f"{sample_id!r} is not in the subset")
