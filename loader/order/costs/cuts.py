"""Cuts a global batch into contiguous shares of about equal cost, one a rank."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..permutation import IntArray


def cut_by_cost(costs: IntArray | Sequence[int], world_size: int, weights: Sequence[float] | None = None) -> list[int]:
    """Cut samples of the given costs into ``world_size`` contiguous shares: world_size + 1 places, 0 to n.

    ``costs`` are whole numbers of at least 0. The shares of any two ranks differ by at most the largest cost, and no
    rank is without a sample where there are as many samples as ranks. That is as good as contiguous shares can be for
    all inputs (one sample on two ranks), and always possible: Bárány and Grinberg, "Block partitions of sequences"
    (2015). With ``weights``, one positive number a rank, shares are in proportion to these instead, each cut at the
    sample's edge that is nearest to its ideal place.

    The construction: let c be the largest cost, x the largest number for which shares of at least x are possible,
    which is found by halving. Shares of x to x + c are then possible. For let S_k be the places at which the k-th share
    may end so. As no sample costs more than c, the shares that begin at neighbouring places end in ranges that meet,
    so that S_k is a whole range, from the first place that k shares of at least x reach, to the last that k shares of
    at most x + c do not pass. Shares of at least x + 1 pass the end, hence the last place of S_W is not before it.
    """
    count = len(costs)
    if weights is not None:
        return _cut_by_weights(list(costs), world_size, weights)
    # A sample counts a little for itself: of shares that cost the same, those of equal numbers of samples are better,
    # and a share without any is the worst. So little that all of them together are less than one unit of cost.
    unit = count + 2
    ends = [0, *accumulate(cost * unit + 1 for cost in map(int, costs))]
    total, most = ends[-1], max((high - low for low, high in pairwise(ends)), default=0)
    least = _largest_least(ends, world_size, total, most)
    first, last = [0], [0]  # of each S_k
    for _ in range(world_size - 1):
        first.append(bisect_left(ends, ends[first[-1]] + least))
        last.append(bisect_right(ends, ends[last[-1]] + least + most) - 1)
    cuts = [count] * (world_size + 1)
    for rank in range(world_size - 1, 0, -1):
        end = ends[cuts[rank + 1]]
        low = max(first[rank], bisect_left(ends, end - least - most))
        high = min(last[rank], bisect_right(ends, end - least) - 1)
        cuts[rank] = min(max(_nearest(ends, total * rank // world_size), low), high)
    cuts[0] = 0
    return cuts


def _largest_least(ends: list[int], world_size: int, total: int, most: int) -> int:
    """The largest x for which there are shares of at least x each: within ``most`` below the mean."""
    low, high = max(0, total // world_size - most), total // world_size
    while low < high:
        tried = (low + high + 1) // 2
        at = 0
        for _ in range(world_size - 1):
            at = bisect_left(ends, ends[at] + tried, at)
            if at == len(ends):
                break
        if at < len(ends) and ends[at] + tried <= total:
            low = tried
        else:
            high = tried - 1
    return low


def _nearest(ends: list[int], wanted: float) -> int:
    place = bisect_left(ends, wanted)
    if place == len(ends):
        return place - 1
    return place - 1 if place and wanted - ends[place - 1] <= ends[place] - wanted else place


def _cut_by_weights(costs: list[int], world_size: int, weights: Sequence[float]) -> list[int]:
    count = len(costs)
    unit = count + 2
    ends = [0, *accumulate(int(cost) * unit + 1 for cost in costs)]
    reached = list(accumulate(weights))
    cuts = [0, *(_nearest(ends, ends[-1] * (part / reached[-1])) for part in reached[:-1]), count]
    for rank in range(1, world_size):  # where there are as many samples as ranks, each has one
        cuts[rank] = min(max(cuts[rank], cuts[rank - 1] + (count >= world_size)), count)
    for rank in range(world_size - 1, 0, -1):
        cuts[rank] = min(cuts[rank], max(0, cuts[rank + 1] - (count >= world_size)))
    return cuts
