"""Selections of an epoch's samples: a subset, or draws in proportion to weights.

A selection turns chunks into *parts*: rows of one chunk, whose number is known without looking at the rows, so that an
order is arithmetic over parts as it is over whole chunks. The rows themselves are found when a window is opened.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import PartitionError
from ..cached import cached_property
from ..permutation import IntArray, permutation, random_numbers, stream_key
from .subset import Subset, blocks

if TYPE_CHECKING:
    from .weights import Weights

_FOR_CHUNK_DRAWS, _FOR_ROW_DRAWS = 4, 5  # what a stream of random numbers is used for, as in plan.py
_U_STEPS = 1024  # the random start of a systematic sample is a multiple of 1/1024, so that sums with it are exact


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of an epoch: (parts,) int64 of their chunks and of their sizes, and ``rows_of(part)``, (size,)."""

    chunks: IntArray
    samples: IntArray
    rows_of: Callable[[int], IntArray]


def lay_rows(parts: Parts, chosen: IntArray) -> tuple[IntArray, IntArray]:
    """The rows of some parts laid end to end, and where each part's begin, (parts,) int64."""
    starts = np.cumsum(parts.samples[chosen]) - parts.samples[chosen]
    return np.concatenate([parts.rows_of(part) for part in chosen.tolist()]), starts


class Selection:
    """Selection of an epoch's samples, and how often each comes; chunks have ``chunk_samples`` rows, (chunks,) int64.

    Making one takes O(samples) time, more for a subset by count, and O(chunks) memory. ``counts``: (chunks,) int64, how
    many samples of each chunk are in the subset. An epoch has ``num_samples`` samples or draws.

    Raises:
        ConfigError: subset or weights do not fit the data set.
        PartitionError: the subset has no sample.
    """

    def __init__(self, chunk_samples: IntArray, subset: Subset | None = None, weights: Weights | None = None) -> None:
        self.subset = subset
        self.weights = weights
        self._starts: IntArray = np.zeros(len(chunk_samples) + 1, np.int64)
        np.cumsum(chunk_samples, out=self._starts[1:])
        total = int(self._starts[-1])
        self._bounds = None if subset is None else subset.bounds(total)
        if weights is not None:
            weights.check(total, len(chunk_samples))
        self.counts = chunk_samples if subset is None else self._sum_chosen(lambda low, high, held: held)
        self.num_samples = int(self.counts.sum())
        if not self.num_samples:
            raise PartitionError(f"{subset} has none of the data set's {total:,} samples; take a larger share")

    @property
    def is_weighted(self) -> bool:
        """True if samples are drawn with replacement, so that one may come several times an epoch."""
        return self.weights is not None

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that the order depends on, as a state holds them."""
        return {
            **({"subset": self.subset.to_dict()} if self.subset is not None else {}),
            **({"weights": self.weights.digest} if self.weights is not None else {}),
        }

    @property
    def members(self) -> list[int]:
        """Number of samples in the subset, and their lowest and highest random number."""
        return [int(self.counts.sum()), *(self._bounds or ())]

    def rows_of(self, chunk: int) -> IntArray:
        """The rows of a chunk whose samples are in the subset, in increasing order: (counts[chunk],) int64."""
        start, stop = int(self._starts[chunk]), int(self._starts[chunk + 1])
        if self.subset is None or self._bounds is None:
            return np.arange(stop - start, dtype=np.int64)
        return np.flatnonzero(self.subset.holds(start, stop, self._bounds))

    def id_at(self, place: int) -> int:
        """The id of the subset's sample at a place, of all its samples in the order of their ids."""
        chunk = int(np.searchsorted(self._places, place, side="right")) - 1
        return int(self._starts[chunk] + self.rows_of(chunk)[place - self._places[chunk]])

    def all_ids(self) -> IntArray:
        """(samples,) int64: the ids of the subset's samples, each once, in increasing order."""
        parts = [self._starts[chunk] + self.rows_of(chunk) for chunk in np.flatnonzero(self.counts).tolist()]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def place_of(self, sample_id: int) -> int | None:
        """The place of a sample id, as ``id_at`` counts them; None if the subset does not have it."""
        if not 0 <= sample_id < self._starts[-1]:
            return None
        chunk = int(np.searchsorted(self._starts, sample_id, side="right")) - 1
        rows, row = self.rows_of(chunk), sample_id - int(self._starts[chunk])
        place = int(np.searchsorted(rows, row))
        return int(self._places[chunk]) + place if place < len(rows) and rows[place] == row else None

    @cached_property
    def _places(self) -> IntArray:
        """(chunks + 1,) int64: how many of the subset's samples are before each chunk, and how many there are."""
        places = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=places[1:])
        return places

    def parts(self, seed: int, epoch: int) -> Parts:
        """The parts of an epoch, in the order of their chunks; without weights the same in all epochs."""
        if self.weights is None:
            chunks = np.flatnonzero(self.counts)
            return Parts(chunks, self.counts[chunks], lambda part: self.rows_of(int(chunks[part])))
        return self._drawn_parts(self.weights, seed, epoch)

    # -- draws ----------------------------------------------------------------------------------------------------

    @cached_property
    def _chunk_weights(self) -> IntArray:
        """(chunks,) int64: the weights of the chunk's samples together."""
        weights = self.weights
        assert weights is not None
        if weights.by_chunk:
            return self.counts * weights.values.astype(np.int64)
        return self._sum_chosen(lambda low, high, held: weights.values[low:high] * held)

    def _drawn_parts(self, weights: Weights, seed: int, epoch: int) -> Parts:
        """Systematic sampling (Madow 1949), of chunks and then of the rows of each: all counts within 1 of expectation.

        The draws of a chunk that has far more of them than samples are dealt to several parts in turn, so that its
        samples repeat far apart in the epoch. Up to a quarter more is one part: that costs no second read of the chunk.
        """
        draws = _systematic(self._chunk_weights, self.num_samples, stream_key(_FOR_CHUNK_DRAWS, seed, epoch))
        held = np.maximum(self.counts, 1)
        counts = np.where(draws > 0, np.maximum(1, -((held - 4 * draws) // (4 * held))), 0)  # parts of each chunk
        chunks = np.repeat(np.arange(len(draws)), counts)
        turn = np.arange(len(chunks)) - np.repeat(np.cumsum(counts) - counts, counts)
        samples = (draws[chunks] - turn + counts[chunks] - 1) // counts[chunks]

        def rows_of(part: int) -> IntArray:
            chunk = int(chunks[part])
            drawn = self._draw_rows(weights, chunk, int(draws[chunk]), stream_key(_FOR_ROW_DRAWS, seed, epoch, chunk))
            return drawn[int(turn[part]) :: int(counts[chunk])]

        return Parts(chunks, samples, rows_of)

    def _draw_rows(self, weights: Weights, chunk: int, draws: int, key: int) -> IntArray:
        """The rows of a chunk's draws, (draws,) int64; copies of a row follow one another.

        Rows are mixed first, so that what alternates in the data set is not drawn in step with the sampling interval.
        """
        rows = self.rows_of(chunk)
        rows = rows[permutation(len(rows), key)]
        values = np.ones(len(rows), np.int64) if weights.by_chunk else weights.values[self._starts[chunk] + rows]
        return np.repeat(rows, _systematic(values, draws, stream_key(key)))

    def _sum_chosen(self, values: Callable[[int, int, Any], Any]) -> IntArray:
        """(chunks,) int64: the sum over each chunk of what ``values(start, stop, held)`` says of each sample."""
        sums = np.zeros(len(self._starts) - 1, np.int64)
        for start, stop in blocks(int(self._starts[-1])):
            if self.subset is None or self._bounds is None:
                held: Any = np.ones(stop - start, np.bool_)
            else:
                held = self.subset.holds(start, stop, self._bounds)
            first = int(np.searchsorted(self._starts, start, side="right")) - 1
            last = int(np.searchsorted(self._starts, stop, side="left"))
            edges = np.maximum(self._starts[first:last], start) - start
            sums[first:last] += np.add.reduceat(values(start, stop, held), edges, dtype=np.int64)
        return sums


def _systematic(weights: IntArray, draws: int, key: int) -> IntArray:
    """Draw systematically: how often each weighted item comes, (items,) int64, with the sum ``draws``.

    Item i gets floor or ceil of draws * weights[i] / sum(weights), which is its mean over all keys; so does any run of
    consecutive items. Sums are of whole numbers, and all else is IEEE arithmetic by element: the same anywhere.
    """
    start = int(random_numbers(0, 1, key)[0]) % _U_STEPS / _U_STEPS
    ends = np.cumsum(weights, dtype=np.int64)
    reached = np.floor(ends / ends[-1] * draws + start).astype(np.int64)
    return np.diff(reached, prepend=0)
