"""The ids of a subset's samples, and of several data sets' samples, as sequences that are computed, not stored."""

from __future__ import annotations

import operator
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, overload

import numpy as np

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..order.selecting import Selection


class _Ids(Sequence[int]):
    """Ids of samples, of which ``places`` are the ordinals that this sequence has."""

    _places: range

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, sample_id: object) -> bool:
        try:
            self.index(sample_id)
        except ValueError:
            return False
        return True


class SelectedIds(_Ids):
    """The sample ids of a selection in increasing order, each once, or some of them; O(chunks) memory.

    ``places`` are the ordinals in the whole sequence that this one has. Any thread may use it.
    """

    def __init__(self, selection: Selection, places: range | None = None) -> None:
        self._selection = selection
        self._places = range(int(selection.counts.sum())) if places is None else places

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
        """Make (len,) int64 of all ids; O(samples) memory."""
        places = self._places
        return self._selection.all_ids()[np.arange(places.start, places.stop, places.step, dtype=np.int64)]

    def index(self, sample_id: object, start: int = 0, stop: int | None = None) -> int:
        """Find the place of a sample id; raises ValueError if it is not in the sequence."""
        if isinstance(sample_id, int | np.integer):
            place = self._selection.place_of(int(sample_id))
            if place is not None:
                return range(len(self))[start:stop].index(self._places.index(place)) + start
        raise ValueError(f"{sample_id!r} is not in the subset")


class JointIds(_Ids):
    """The joint ids of the samples of several sources, or some of them: those of source k count from first_ids[k] on.

    ``parts`` are the sources' own ids, increasing; ``places`` as of ``SelectedIds``. Any thread may use it.
    """

    def __init__(
        self, parts: Sequence[range | SelectedIds], first_ids: Sequence[int], places: range | None = None
    ) -> None:
        self._parts = parts
        self._first_ids = first_ids
        self._edges: list[int] = np.cumsum([0, *map(len, parts)]).tolist()
        self._places = range(self._edges[-1]) if places is None else places

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> JointIds: ...
    def __getitem__(self, index: int | slice) -> int | JointIds:
        if isinstance(index, slice):
            return JointIds(self._parts, self._first_ids, self._places[index])
        place = self._places[operator.index(index)]
        source = bisect_right(self._edges, place) - 1
        return self._first_ids[source] + self._parts[source][place - self._edges[source]]

    def index(self, sample_id: object, start: int = 0, stop: int | None = None) -> int:
        """Find the place of a joint sample id; raises ValueError if it is not in the sequence."""
        if isinstance(sample_id, int | np.integer) and sample_id >= 0:
            source = bisect_right(self._first_ids, int(sample_id)) - 1
            place = self._edges[source] + self._parts[source].index(int(sample_id) - self._first_ids[source])
            return range(len(self))[start:stop].index(self._places.index(place)) + start
        raise ValueError(f"{sample_id!r} is not among them")

    def array(self) -> IntArray:
        """Make (len,) int64 of all ids; O(samples) memory."""
        return np.fromiter(self, np.int64, len(self))

    def of_source(self, source: int) -> range | SelectedIds:
        """List the ids of one source's samples, as the source numbers them, increasing."""
        low, high = self._edges[source : source + 2]
        places = self._places if self._places.step > 0 else self._places[::-1]
        own = places[bisect_left(places, low) : bisect_left(places, high)]
        return self._parts[source][own.start - low : own.stop - low : own.step]
