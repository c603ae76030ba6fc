"""A walk over an epoch's order on all lanes: what an index says of the samples at some positions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from ..plan import EpochPlan, bit_reverse, lane_offsets, rank_segments
from .cuts import cut_by_cost

if TYPE_CHECKING:
    from ..permutation import IntArray
    from .costs import CostValues, SampleCosts


@dataclass(frozen=True, slots=True)
class _Numbers:
    """Entries of the index for a window's samples, in the order of their offsets ``start`` to ``stop`` in the lane."""

    index: int
    start: int
    stop: int
    values: CostValues


class CostWalk:
    """Looks up the costs of consecutive positions of an epoch, which best increase from call to call.

    The only state is the numbers of the windows that were looked at last, two or four bytes a sample. Used by one
    thread.
    """

    def __init__(self, plan: EpochPlan, costs: SampleCosts) -> None:
        self._plan = plan
        self._costs = costs
        self._first_ids: IntArray = np.cumsum(plan.chunk_samples) - plan.chunk_samples
        self._held: dict[int, list[_Numbers]] = {}

    def by_lane(self, bounds: IntArray) -> CostValues:
        """The numbers of the steps that begin and end at ``bounds``, in the order that ranks are cut in.

        (bounds[-1] - bounds[0],), sorted by step, lane and offset.
        """
        segments = rank_segments(bounds, self._plan.turns, 0, 1)
        flat, firsts, starts = self._laid_out(int(bounds[0]), int(bounds[-1]))
        lengths = segments.stop - segments.start
        places = starts[segments.lane] + segments.start - firsts[segments.lane]
        within = np.repeat(places - (np.cumsum(lengths) - lengths), lengths)
        found: CostValues = flat[within + np.arange(len(within))]
        return found

    def by_position(self, start: int, stop: int) -> CostValues:
        """The numbers of the positions ``start`` to ``stop``, (stop - start,)."""
        flat, firsts, starts = self._laid_out(start, stop)
        lanes = self._plan.order.lanes
        positions = np.arange(start, stop, dtype=np.int64)
        lane = bit_reverse(positions % lanes, lanes.bit_length() - 1)
        found: CostValues = flat[starts[lane] + positions // lanes - firsts[lane]]
        return found

    def _laid_out(self, start: int, stop: int) -> tuple[CostValues, IntArray, IntArray]:
        """The numbers of some positions, lane after lane; each lane's first offset, and its place: (lanes,) each."""
        edges = lane_offsets(np.array([start, stop], np.int64), self._plan.turns)
        counts = edges[1] - edges[0]
        parts = [
            self._of_lane(lane, int(edges[0, lane]), int(edges[1, lane])) for lane in np.flatnonzero(counts).tolist()
        ]
        flat = np.concatenate(parts) if parts else np.empty(0, self._costs.values.dtype)
        return flat, edges[0], np.cumsum(counts) - counts

    def _of_lane(self, lane: int, start: int, stop: int) -> CostValues:
        held = [window for window in self._held.get(lane, ()) if window.stop > start]
        if held and held[0].start > start:
            held = []  # the walk went back
        while not held or held[-1].stop < stop:
            held.append(self._read(lane, held[-1].index + 1 if held else self._plan.window_at(lane, start)))
        self._held[lane] = held
        needed = [window for window in held if window.start < stop]
        parts = [window.values[max(0, start - window.start) : stop - window.start] for window in needed]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _read(self, lane: int, index: int) -> _Numbers:
        window = self._plan.open_window(lane, index)
        pieces, rows = window.locate(np.arange(window.start, window.stop, dtype=np.int64))
        values = self._costs.values[self._first_ids[window.chunks[pieces]] + rows]
        return _Numbers(index, window.start, window.stop, values)


class CostCuts:
    """Cuts global batches of an epoch by cost. Used by one thread."""

    def __init__(self, plan: EpochPlan, costs: SampleCosts) -> None:
        self._costs = costs
        self._walk = CostWalk(plan, costs)

    def of(self, bounds: IntArray, world_size: int, weights: Sequence[float] | None = None) -> IntArray:
        """Cut consecutive global batches, as ``share_bounds`` does: (steps, world_size + 1) int64."""
        return _cut_steps(self.by_lane(bounds), bounds - bounds[0], world_size, weights)

    def by_lane(self, bounds: IntArray) -> IntArray:
        """Compute the costs of steps that begin and end at ``bounds``, in the order of ``CostWalk.by_lane``."""
        return self._costs.apply(self._walk.by_lane(bounds).astype(np.int64))


def cut_together(
    parts: Sequence[tuple[CostCuts, IntArray]],
    columns: IntArray,
    world_size: int,
    weights: Sequence[float] | None,
) -> IntArray:
    """Cut steps that take of several epochs, whose samples are sorted by (step, lane, part): as ``CostCuts.of`` does.

    ``parts``: the costs of each epoch, and the positions of it, (steps + 1,), where steps begin and end; ``columns``
    (steps + 1, lanes * parts): the offsets there of each lane of each epoch.
    """
    counts = np.diff(columns, axis=0)
    firsts = (np.cumsum(counts.ravel()) - counts.ravel()).reshape(counts.shape)
    costs = np.empty(int(counts.sum()), np.int64)
    for number, (own, bounds) in enumerate(parts):
        of_part = counts[:, number :: len(parts)].ravel()
        shift = np.repeat(firsts[:, number :: len(parts)].ravel() - (np.cumsum(of_part) - of_part), of_part)
        costs[shift + np.arange(len(shift))] = own.by_lane(bounds)
    edges = np.concatenate(([0], np.cumsum(counts.sum(axis=1))))
    return _cut_steps(costs, edges, world_size, weights)


def _cut_steps(costs: IntArray, edges: IntArray, world_size: int, weights: Sequence[float] | None) -> IntArray:
    cuts = [cut_by_cost(costs[low:high], world_size, weights) for low, high in pairwise(edges.tolist())]
    return np.array(cuts, np.int64).reshape(len(cuts), world_size + 1)
