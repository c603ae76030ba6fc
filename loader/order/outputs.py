"""The order of outputs where lanes yield different numbers of them: rule 4 while all lanes can, then lane after lane.

Pure arithmetic over what is known of the lanes: (lanes,) int64 each, ``known`` outputs so far and ``totals``, -1 where
a lane's end has not been reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .plan import batch_bounds, rank_segments

if TYPE_CHECKING:
    from .permutation import IntArray


def fillable(known: IntArray, turns: IntArray) -> int:
    """The first position for which some lane lacks the output that rule 4 asks of it."""
    return int((known * len(turns) + turns).min())


def limit(totals: IntArray, turns: IntArray) -> int | None:
    """The first position for which a lane, as far as known, has no output left; None while no lane has ended."""
    ended = totals >= 0
    return int((totals[ended] * len(turns) + turns[ended]).min()) if ended.any() else None


@dataclass(frozen=True, slots=True)
class Tail:
    """The end of an epoch: from position ``start`` on, what is left of each lane, laid end to end, lane by lane.

    ``taken`` (lanes,): the outputs of each lane before it; ``totals`` (lanes,): all that there are. ``is_resumed``:
    some of the tail came before ``start``.
    """

    start: int
    taken: IntArray
    totals: IntArray
    is_resumed: bool = False

    @property
    def stop(self) -> int:
        """The number of outputs of the epoch."""
        return self.start + int((self.totals - self.taken).sum())

    def taken_at(self, position: int) -> IntArray:
        """(lanes,): how many outputs of each lane come before a position at or after ``start``."""
        left = self.totals - self.taken
        before = np.cumsum(left) - left
        taken: IntArray = self.taken + np.clip(position - self.start - before, 0, left)
        return taken

    def segments(self, start: int, stop: int) -> list[tuple[int, int, int]]:
        """Segments of positions ``start`` to ``stop``: (lane, first output, one past the last), lane by lane."""
        first, last = self.taken_at(start), self.taken_at(stop)
        return [(lane, int(first[lane]), int(last[lane])) for lane in np.flatnonzero(last > first).tolist()]


def lanes_of_share(
    position: int,
    turns: IntArray,
    global_batch_size: int,
    rank: int,
    world_size: int,
    weights: Sequence[float] | None = None,
) -> IntArray:
    """The lanes that one rank's share of global batches from ``position`` on ever has a part of, in increasing order.

    Batches repeat their pattern of lanes after lanes / gcd(lanes, global_batch_size) steps.
    """
    lanes = len(turns)
    period = lanes // int(np.gcd(lanes, global_batch_size))
    at_once = max(1, (1 << 20) // lanes)
    found = np.zeros(lanes, np.bool_)
    for first in range(0, period, at_once):
        steps = min(at_once, period - first)
        start = position + first * global_batch_size
        bounds = batch_bounds(start, steps, global_batch_size, start + steps * global_batch_size)
        found[rank_segments(bounds, turns, rank, world_size, weights).lane] = True
    found |= keeper_ranks(lanes, world_size) == rank
    return np.flatnonzero(found)


def keeper_ranks(lanes: int, world_size: int) -> IntArray:
    """(lanes,): the one rank that answers for each lane's end, among those that read it."""
    ranks: IntArray = np.arange(lanes, dtype=np.int64) * world_size // lanes
    return ranks
