"""Cut the positions of an epoch into global batches: by number, or under a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..plan import EpochPlan, Share, batch_bounds, count_steps

if TYPE_CHECKING:
    from ..permutation import IntArray
    from .budget import StepBudget

_BLOCK = 1 << 14  # positions whose tokens are looked up at once


class Steps(Protocol):
    """The global batches of one epoch, from any position on. Used by one thread."""

    def ahead(self, first: int, most: int) -> int:
        """Count the batches left from position ``first`` on, up to ``most``."""

    def bounds(self, first: int, steps: int) -> IntArray:
        """(steps + 1,) int64: the positions at which ``steps`` batches begin and end."""

    def count(self, first: int) -> int:
        """Count the batches left from position ``first`` on."""


@dataclass(frozen=True, slots=True)
class EvenSteps:
    """Batches of ``size`` positions."""

    num_samples: int
    size: int
    last_batch: str

    def ahead(self, first: int, most: int) -> int:
        return min(most, self.count(first))

    def bounds(self, first: int, steps: int) -> IntArray:
        return batch_bounds(first, steps, self.size, self.num_samples)

    def count(self, first: int) -> int:
        return count_steps(self.num_samples, first, self.size, self.last_batch)


class BudgetSteps:
    """Batches under a budget: from each position on, the longest run of positions that fits.

    A batch depends on the position that it begins at alone, so a resume at a batch's end cuts the same batches. The
    last one is smaller; "drop" leaves it out, unless no further sample as long as its longest would fit.
    """

    def __init__(self, plan: EpochPlan, budget: StepBudget, last_batch: str) -> None:
        from .walk import CostWalk

        self._num_samples = plan.num_samples
        self._budget = budget
        self._drops = last_batch == "drop"
        self._walk = CostWalk(plan, budget.costs)
        self._from = 0
        self._numbers: IntArray = np.empty(0, np.int64)  # of the positions from ``_from`` on
        self._known: IntArray = np.empty(0, np.int64)  # bounds that were found, to the epoch's end
        self._usual = budget.usual_rows

    def ahead(self, first: int, most: int) -> int:
        return len(self._find(first, most)) - 1

    def bounds(self, first: int, steps: int) -> IntArray:
        return self._find(first, steps)

    def count(self, first: int) -> int:
        """As of the protocol; the first call in an epoch looks at all of its samples."""
        place = int(np.searchsorted(self._known, first))
        if place == len(self._known) or self._known[place] != first:
            self._known = self._find(first, self._num_samples + 1)
            place = 0
        return len(self._known) - 1 - place

    def _find(self, first: int, most: int) -> IntArray:
        found = [first]
        while len(found) <= most and (stop := self._stop(found[-1])) is not None:
            found.append(stop)
        return np.array(found, np.int64)

    def _stop(self, first: int) -> int | None:
        """Return the end of the batch that begins at ``first``; None if there is none."""
        left = self._num_samples - first
        if left <= 0:
            return None
        budget = self._budget
        size = min(left, 2 * self._usual + 2 * budget.multiple)
        while True:
            numbers = self._look(first, size)
            fitting = budget.count_fitting(numbers)
            if len(numbers) - fitting >= budget.multiple:
                return first + fitting
            if size == left:
                break
            size = min(left, 2 * size)
        if fitting < left and not budget.holds(numbers):  # what is left does not fill the ranks' rows evenly
            return first + fitting
        is_full = left % budget.multiple == 0 and not budget.holds(numbers, more=budget.multiple)
        return None if self._drops and not is_full else self._num_samples

    def _look(self, first: int, size: int) -> IntArray:
        start = first - self._from
        if start < 0 or start + size > len(self._numbers):
            stop = min(self._num_samples, first + max(size, _BLOCK))
            self._numbers, self._from, start = self._walk.by_position(first, stop).astype(np.int64), first, 0
        return self._numbers[start : start + size]


def plan_steps(plan: EpochPlan, share: Share, last_batch: str) -> Steps:
    """The steps of an epoch for ranks with this share."""
    if share.budget is not None:
        return BudgetSteps(plan, share.budget, last_batch)
    return EvenSteps(plan.num_samples, share.global_batch_size, last_batch)


def skip_steps(
    epoch: int,
    consumed: int,
    count: int,
    steps_of: Callable[[int], Steps],
    tell: Callable[[int, int, int], None] = lambda *_: None,
    tell_end: Callable[[int, int], None] = lambda *_: None,
) -> tuple[int, int]:
    """Skip ``count`` batches, through the ends of epochs; returns (epoch, consumed).

    ``steps_of`` gives an epoch's batches; ``tell`` gets the positions passed over as (epoch, start, stop). What "drop"
    drops is not among them; ``tell_end`` gets where it begins, or the epoch ends, as (epoch, position).
    """
    while count:
        steps = steps_of(epoch)
        taken = steps.ahead(consumed, count)
        stop = int(steps.bounds(consumed, taken)[-1])
        tell(epoch, consumed, stop)
        count -= taken
        if steps.ahead(stop, 1):
            consumed = stop
        else:
            tell_end(epoch, stop)
            epoch, consumed = epoch + 1, 0
    return epoch, consumed
