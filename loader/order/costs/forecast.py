"""Forecast what costs do to a run: how uneven ranks are, how much is padding, and how often chunks are read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..plan import EpochPlan, Share, batch_bounds, share_bounds
from ..spans import EpochSpans
from .costs import SampleCosts, spread
from .cuts import cut_by_cost
from .steps import BudgetSteps
from .walk import CostWalk

if TYPE_CHECKING:
    from ..permutation import IntArray
    from .budget import StepBudget

_MOST_SAMPLES = 1 << 20  # that are looked at
_MOST_BATCHES = 64


@dataclass(frozen=True, kw_only=True)
class CostForecast:
    """Of some ``batches`` spread over an epoch. Skews are the costliest rank's cost over the mean rank's, on average.

    ``skew``: where ranks have equally many samples; ``skew_by_cost``: where they are cut by cost. ``padding`` is the
    share of a padded batch's tokens that is padding, ``bucket_padding`` that with buckets, both for equally many
    samples a rank. 0 and 1 are the best there are. With a budget, ``budget_batches`` is how many an epoch has, and
    ``budget_padding`` what of their tokens is padding; else None. ``bucket_run`` and ``bucket_pool`` are in samples.
    """

    world_size: int
    global_batch_size: int
    batches: int
    skew: float
    skew_by_cost: float
    padding: float
    bucket_run: int
    bucket_pool: int
    bucket_skew: float
    bucket_padding: float
    budget_batches: int | None = None
    budget_padding: float | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def forecast_costs(
    plain: EpochPlan,
    bucketed: EpochPlan,
    costs: SampleCosts,
    *,
    world_size: int,
    global_batch_size: int,
    bucket: tuple[int, int],
    budget: StepBudget | None = None,
) -> CostForecast:
    """Measure full global batches of two orders of the same samples. ``bucket``: the run and pool, in samples."""
    steps = plain.num_samples // global_batch_size
    count = min(steps, _MOST_BATCHES, max(2, _MOST_SAMPLES // global_batch_size))
    firsts = (np.linspace(0, steps - 1, count).astype(np.int64) * global_batch_size).tolist()
    walks = CostWalk(plain, costs), CostWalk(bucketed, costs)
    batches = [[_numbers(walk, first, global_batch_size) for first in firsts] for walk in walks]
    even = share_bounds(np.array([global_batch_size]), world_size)[0]
    priced = [costs.apply(numbers) for numbers in batches[0]]
    cut = [_sums(price, np.array(cut_by_cost(price, world_size))) for price in priced]
    found = None if budget is None else _under_budget(bucketed, budget, world_size)
    return CostForecast(
        world_size=world_size,
        global_batch_size=global_batch_size,
        batches=count,
        skew=float(np.mean([spread(_sums(price, even)) for price in priced])),
        skew_by_cost=float(np.mean([spread(sums) for sums in cut])),
        padding=_padding(batches[0], [even] * count),
        bucket_run=bucket[0],
        bucket_pool=bucket[1],
        bucket_skew=float(np.mean([spread(_sums(costs.apply(numbers), even)) for numbers in batches[1]])),
        bucket_padding=_padding(batches[1], [even] * count),
        budget_batches=None if found is None else found[0],
        budget_padding=None if found is None else found[1],
    )


def count_reads(plan: EpochPlan, *, world_size: int, global_batch_size: int, costs: SampleCosts | None = None) -> float:
    """Mean number of times that all ranks together read each chunk of an epoch; O(samples) time.

    Ranks' shares are equal, or cut by ``costs``. A rank reads a chunk once for each lane that it lies in, as it does
    where its memory holds the open windows.
    """
    steps = plan.num_samples // global_batch_size
    reads = 0
    for rank in range(world_size):
        spans = EpochSpans(plan, Share(rank, world_size, global_batch_size, costs=None if costs is None else (costs,)))
        pairs: set[tuple[int, int]] = set()
        for first in range(0, steps, 16):
            here = first * global_batch_size
            span, entered = spans.plan_span(here, min(16, steps - first))
            for window in entered:
                lane = window.window.lane
                pairs.update((lane, chunk) for chunk in window.chunks.tolist())
            for _ in spans.close_windows(int(span.bounds[-1])):
                pass
        reads += len(pairs)
    return reads / len(plan.chunk_samples)


def _numbers(walk: CostWalk, first: int, size: int) -> IntArray:
    return walk.by_lane(batch_bounds(first, 1, size, first + size)).astype(np.int64)


def _sums(costs: IntArray, cuts: IntArray) -> IntArray:
    ends = np.concatenate((np.zeros(1, np.int64), np.cumsum(costs)))
    sums: IntArray = ends[cuts[1:]] - ends[cuts[:-1]]
    return sums


def _padding(batches: Sequence[IntArray], cuts: Sequence[IntArray]) -> float:
    used = padded = 0
    for numbers, of_batch in zip(batches, cuts, strict=True):
        used += int(numbers.sum())
        for low, high in zip(of_batch[:-1].tolist(), of_batch[1:].tolist(), strict=True):
            padded += (high - low) * int(numbers[low:high].max(initial=0))
    return 1 - used / padded if padded else 0.0


def _under_budget(plan: EpochPlan, budget: StepBudget, world_size: int) -> tuple[int, float]:
    bounds = BudgetSteps(plan, budget, "drop").bounds(0, plan.num_samples)
    walk = CostWalk(plan, budget.costs)
    chosen = (
        np.unique(np.linspace(0, len(bounds) - 2, _MOST_BATCHES).astype(np.int64)).tolist() if len(bounds) > 1 else []
    )
    batches = [_numbers(walk, int(bounds[i]), int(bounds[i + 1] - bounds[i])) for i in chosen]
    cuts = [share_bounds(np.array([len(numbers)]), world_size)[0] for numbers in batches]
    return len(bounds) - 1, _padding(batches, cuts)
