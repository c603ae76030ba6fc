"""How the positions of an epoch are cut into global batches: by number, or under a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ...errors import ConfigError, PartitionError
from ..permutation import IntArray
from ..plan import EpochPlan, Share, batch_bounds, count_steps
from .costs import DEFAULT_INDEX, SampleCosts
from .walk import CostWalk

_BLOCK = 1 << 14  # positions whose tokens are looked up at once


@dataclass(frozen=True, kw_only=True)
class TokenBudget:
    """Batches of as many consecutive samples as ``tokens`` hold; ``batch_tokens=4096`` is ``TokenBudget(tokens=4096)``.

    ``tokens`` are of one rank, or with ``whole`` of all ranks together, so that the number of ranks changes no global
    batch. With ``padded`` a batch has rows × its longest sample tokens, as a padded tensor does. Ranks then have
    equally many rows, and each keeps within its budget; with ``whole``, a rank may have one row more than another.
    Without ``padded`` a batch has the sum of its samples' tokens, and all ranks together keep within their budgets.
    ``index`` names the index of tokens that ``penstock index --cost`` wrote.

    Raises:
        ConfigError: a number is not what it must be.
    """

    tokens: int
    whole: bool = False
    padded: bool = True
    index: str = DEFAULT_INDEX

    def __post_init__(self) -> None:
        if not isinstance(self.tokens, int) or isinstance(self.tokens, bool) or self.tokens < 1:
            raise ConfigError(f"batch_tokens={self.tokens!r}: must be a whole number of at least 1")
        for name in ("whole", "padded"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"TokenBudget({name}={getattr(self, name)!r}): must be True or False")

    @staticmethod
    def read(given: int | TokenBudget) -> TokenBudget:
        """A number of tokens as the budget of a rank."""
        return given if isinstance(given, TokenBudget) else TokenBudget(tokens=given)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepBudget:
    """A budget of ``tokens`` for all ranks together; where ranks have rows in step, batches are of ``multiple`` rows.

    Raises:
        PartitionError: a rank's part of it does not hold the longest sample.
    """

    tokens: int
    multiple: int
    padded: bool
    costs: SampleCosts

    @staticmethod
    def of(budget: TokenBudget, costs: SampleCosts, world_size: int) -> StepBudget:
        tokens = budget.tokens if budget.whole else budget.tokens * world_size
        longest = max(1, costs.largest)
        if tokens < longest * world_size:
            sample = int(costs.values.argmax())
            of_all = f" in each of {world_size} ranks' parts" if budget.whole else ""
            raise PartitionError(
                f"batch_tokens={budget.tokens}: sample {sample} has {longest:,} tokens, and must fit{of_all}; give at "
                f"least {longest * world_size if budget.whole else longest:,}, or cut long samples"
            )
        multiple = world_size if budget.padded and not budget.whole else 1
        return StepBudget(tokens=tokens, multiple=multiple, padded=budget.padded, costs=costs)

    @property
    def usual_rows(self) -> int:
        """About how many samples a global batch has."""
        return max(self.multiple, int(self.tokens / max(1.0, float(self.costs.values.mean()))))

    def count_fitting(self, numbers: IntArray) -> int:
        """How many of some samples, from the first on, fit into a batch: a multiple of ``multiple``."""
        numbers = np.maximum(numbers, 1)
        ends = np.arange(self.multiple, len(numbers) + 1, self.multiple)
        reached = np.maximum.accumulate(numbers)[ends - 1] * ends if self.padded else np.cumsum(numbers)[ends - 1]
        return int(np.searchsorted(reached, self.tokens, side="right")) * self.multiple

    def holds(self, numbers: IntArray, *, more: int = 0) -> bool:
        """Whether samples fit into one batch, with ``more`` rows that are as long as their longest."""
        numbers = np.maximum(numbers, 1)
        longest = int(numbers.max())
        if not self.padded:
            return int(numbers.sum()) + more * longest <= self.tokens
        rows = -(-(len(numbers) + more) // self.multiple) * self.multiple
        return rows * longest <= self.tokens


class Steps(Protocol):
    """The global batches of one epoch, from any position on. Used by one thread."""

    def ahead(self, first: int, most: int) -> int:
        """How many batches are left from position ``first`` on, or ``most`` if more are."""

    def bounds(self, first: int, steps: int) -> IntArray:
        """(steps + 1,) int64: the positions at which so many batches begin and end."""

    def count(self, first: int) -> int:
        """How many batches are left from position ``first`` on."""


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
        """Where the batch that begins at ``first`` ends; None if there is none."""
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
    """Where ``count`` batches further is, as (epoch, consumed), through the ends of epochs.

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
