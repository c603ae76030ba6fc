"""Share of a rank in every global batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import PartitionError

if TYPE_CHECKING:
    from .costs.budget import StepBudget
    from .costs.costs import SampleCosts
    from .permutation import IntArray


def share_bounds(sizes: IntArray, world_size: int, weights: Sequence[float] | None = None) -> IntArray:
    """Cut global batches of the given sizes (steps,) into shares: (steps, world_size + 1) int64, from 0 to each size.

    Shares are equal to within one sample, or proportional to ``weights`` (one positive number per rank), also to within
    one sample.
    """
    if weights is None:
        ranks = np.arange(world_size + 1, dtype=np.int64)
        cuts: IntArray = sizes[:, None] // world_size * ranks + np.minimum(ranks, sizes[:, None] % world_size)
        return cuts
    check_weights(weights, world_size)
    cut = np.concatenate(([0.0], np.cumsum(np.asarray(weights, np.float64))))
    cuts = np.rint(sizes[:, None] * (cut / cut[-1])).astype(np.int64)
    return cuts


def check_weights(weights: Sequence[float], world_size: int) -> None:
    """Raise PartitionError unless there is one positive, finite weight per rank."""
    try:
        fit = len(weights) == world_size and all(0 < weight < float("inf") for weight in weights)
    except (TypeError, ValueError):  # what cannot be compared with a number
        fit = False
    if not fit or isinstance(weights, str | bytes):
        raise PartitionError(f"shares={weights!r}: needs {world_size} positive numbers, one a rank")


@dataclass(frozen=True, slots=True)
class Share:
    """Share of this rank in every global batch. ``weights``: one positive number per rank; None for equal parts.

    With ``pad``, a rank gets no more samples of the last, smaller batch than of a full one, and without any it borrows
    one, to have a row to repeat. With or without ``pad``, a rank without a sample of any step of a span borrows one, to
    know which fields a batch has.
    ``costs``, one a source: parts cost the same, instead of having as many samples. ``budget``: global batches are as
    large as it lets them be, and ``global_batch_size`` about how large that is.
    """

    rank: int
    world_size: int
    global_batch_size: int
    weights: Sequence[float] | None = None
    pad: bool = False
    costs: Sequence[SampleCosts] | None = None
    budget: StepBudget | None = None

    def __post_init__(self) -> None:
        if self.weights is not None:
            check_weights(self.weights, self.world_size)

    def cuts(self, sizes: IntArray) -> IntArray:
        """``share_bounds`` of global batches of the given sizes (steps,), none above a full one."""
        cuts = share_bounds(sizes, self.world_size, self.weights)
        if not self.pad or self.weights is None:  # equal parts do not grow where the batch is smaller
            return cuts
        full = share_bounds(np.array([self.global_batch_size]), self.world_size, self.weights)
        # What a part has too many goes to the ranks after it, and what is over at the end to those before it.
        less = np.minimum.accumulate(cuts - full, axis=1)
        less[:, -1] = (cuts - full)[:, -1]
        capped: IntArray = full + np.maximum.accumulate(less[:, ::-1], axis=1)[:, ::-1]
        return capped

    @property
    def batch_size(self) -> int:
        """The number of samples of a full global batch that are this rank's."""
        cuts = share_bounds(np.array([self.global_batch_size]), self.world_size, self.weights)[0]
        return int(cuts[self.rank + 1] - cuts[self.rank])
