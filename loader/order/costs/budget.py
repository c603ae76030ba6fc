"""Budgets of tokens: what users give, and what it means for all ranks together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ConfigError, PartitionError
from .costs import DEFAULT_INDEX, SampleCosts

if TYPE_CHECKING:
    from ..permutation import IntArray


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
        """Count the samples, from the first on, that fit into a batch: a multiple of ``multiple``."""
        numbers = np.maximum(numbers, 1)
        ends = np.arange(self.multiple, len(numbers) + 1, self.multiple)
        reached = np.maximum.accumulate(numbers)[ends - 1] * ends if self.padded else np.cumsum(numbers)[ends - 1]
        return int(np.searchsorted(reached, self.tokens, side="right")) * self.multiple

    def holds(self, numbers: IntArray, *, more: int = 0) -> bool:
        """Return whether samples fit into one batch, with ``more`` rows that are as long as their longest."""
        numbers = np.maximum(numbers, 1)
        longest = int(numbers.max())
        if not self.padded:
            return int(numbers.sum()) + more * longest <= self.tokens
        rows = -(-(len(numbers) + more) // self.multiple) * self.multiple
        return rows * longest <= self.tokens
