"""Measure how well an order mixes: some global batches of an epoch, compared with those of a uniform shuffle.

Samples that lie side by side in a data set tend to be alike (one class, one document, one day), so what harms training
is that neighbours meet in a batch. Ratios are to the expectation of a uniform shuffle: 1 is as good, less is more even
than chance would have it, and 10 is ten times as clumped.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .plan import EpochPlan, batch_bounds, rank_segments

if TYPE_CHECKING:
    from .permutation import IntArray

_CLASSES = 10
_FAIR, _POOR, _MOST_DRIFT = 1.5, 4.0, 0.2  # spreads of classes, and a correlation, from which on words change
_MOST_WINDOWS = 1 << 13  # windows opened at most, which takes a second or two
_MOST_BATCHES = 64
_EXPECTED_PAIRS = 256  # neighbours are counted as far apart as makes a uniform shuffle have so many: noise of 6%


@dataclass(frozen=True, kw_only=True)
class Mixing:
    """Measures of mixing in some ``batches`` of an epoch, from their sample ids alone.

    ``neighbours``: how often two samples at most ``distance`` ids apart meet in a batch, over the same of a uniform
    shuffle. ``classes``: if the data set were sorted by ten classes, the spread of their counts in a batch, over that
    of a uniform shuffle. ``drift``: the correlation of position and id; 1 is manifest order, 0 no trace of it.
    """

    batches: int
    distance: int
    neighbours: float
    classes: float
    drift: float

    @property
    def verdict(self) -> str:
        """In a word: "uniform", "fair", or "poor", where a data set that is sorted would make lopsided batches."""
        if abs(self.drift) > _MOST_DRIFT or self.classes > _POOR:
            return "poor"
        return "fair" if self.classes > _FAIR else "uniform"


def measure_mixing(plan: EpochPlan, global_batch_size: int) -> Mixing | None:
    """Measure some full global batches that are spread evenly over an epoch; None if no batch is full."""
    steps = plan.num_samples // global_batch_size
    if not steps or global_batch_size < 2:
        return None
    lanes = min(plan.order.lanes, global_batch_size)
    count = int(min(steps, _MOST_BATCHES, max(2, _MOST_WINDOWS // lanes)))
    chosen = np.linspace(0, steps - 1, count).astype(np.int64)
    first_ids = np.cumsum(plan.chunk_samples) - plan.chunk_samples
    ids = np.stack([batch_ids(plan, first_ids, int(step) * global_batch_size, global_batch_size) for step in chosen])
    pairs_in_reach = count * global_batch_size * (global_batch_size - 1) / plan.num_samples  # a unit of distance
    distance = int(min(max(1, -(-_EXPECTED_PAIRS // max(pairs_in_reach, 1e-9))), max(1, plan.num_samples // 8)))
    return Mixing(
        batches=count,
        distance=distance,
        neighbours=_neighbours(ids, plan.num_samples, distance),
        classes=_classes(ids, plan.num_samples),
        drift=_drift(ids, chosen),
    )


def batch_ids(plan: EpochPlan, first_ids: IntArray, first: int, count: int) -> IntArray:
    """The sample ids at ``count`` positions from ``first`` on, sorted by lane and offset: (count,) int64.

    ``first_ids``: the id of each chunk's first sample, (chunks,) int64.
    """
    segments = rank_segments(batch_bounds(first, 1, count, plan.num_samples), plan.turns, 0, 1)
    found: list[IntArray] = []
    for lane, start, stop in zip(segments.lane.tolist(), segments.start.tolist(), segments.stop.tolist(), strict=True):
        while start < stop:
            window = plan.open_window(lane, plan.window_at(lane, start))
            pieces, rows = window.locate(np.arange(start, min(stop, window.stop), dtype=np.int64))
            found.append(first_ids[window.chunks[pieces]] + rows)
            start = window.stop
    return np.concatenate(found)


def _neighbours(ids: IntArray, num_samples: int, distance: int) -> float:
    batches, size = ids.shape
    ordered = np.sort(ids, axis=1)
    later = [np.searchsorted(row, row + distance, side="right") - np.arange(1, size + 1) for row in ordered]
    met = sum(int(count.sum()) for count in later)
    # Of all pairs of samples, those at most d apart are the fraction that this many of N * (N - 1) / 2 are.
    close = distance * num_samples - distance * (distance + 1) / 2
    expected = batches * size * (size - 1) / 2 * close / (num_samples * (num_samples - 1) / 2)
    return met / expected


def _classes(ids: IntArray, num_samples: int) -> float:
    size = ids.shape[1]
    classes = ids * _CLASSES // num_samples
    counts = np.stack([np.bincount(row, minlength=_CLASSES) for row in classes])
    share = 1 / _CLASSES
    # Drawn without replacement: the variance of a hypergeometric count.
    variance = size * share * (1 - share) * (num_samples - size) / max(1, num_samples - 1)
    if not variance:
        return 1.0
    return float(np.sqrt(((counts - size * share) ** 2).mean() / variance))


def _drift(ids: IntArray, steps: IntArray) -> float:
    if len(steps) < 3:
        return 0.0
    positions = np.repeat(steps, ids.shape[1]).astype(np.float64)
    return float(np.corrcoef(positions, ids.ravel())[0, 1])
