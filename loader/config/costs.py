"""The loader's arguments about costs, checked, and read with the indexes that they name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..order.costs.buckets import Bucket
from ..order.costs.budget import StepBudget, TokenBudget
from ..order.costs.costs import Cost

if TYPE_CHECKING:
    from ..order.costs.costs import SampleCosts
    from ..order.plan import Share

    OpenIndex = Callable[[Cost], Sequence[SampleCosts]]  # reads the index beside the manifest of each source


@dataclass(frozen=True, kw_only=True)
class CostArguments:
    """The arguments about costs: to balance the ranks by, to bucket by, and to batch by; None where not given.

    Raises:
        ConfigError: a value, or a combination with the other arguments, cannot work; says what would.
    """

    cost: Cost | None
    bucket: Bucket | None
    budget: TokenBudget | None

    @staticmethod
    def read(
        cost: str | Cost | None,
        bucket: str | Bucket | None,
        batch_tokens: int | TokenBudget | None,
        *,
        last_batch: str,
        batch_sizes: tuple[int | None, int | None],
    ) -> CostArguments:
        if cost is None and bucket is None and batch_tokens is None:
            return CostArguments(cost=None, bucket=None, budget=None)
        if batch_tokens is not None and batch_sizes != (None, None):
            batch_size, global_batch_size = batch_sizes
            raise ConfigError(
                f"batch_tokens={batch_tokens} with batch_size={batch_size}, global_batch_size={global_batch_size}: the "
                "budget decides how many samples a batch has; give one of them"
            )
        for name, given in (("cost", cost), ("batch_tokens", batch_tokens)):
            if given is not None and last_batch == "pad":
                raise ConfigError(
                    f"{name}= with last_batch='pad': batches differ in their number of rows, so there is none to fill "
                    "up to; use 'partial', which delivers every sample, or 'drop'"
                )
        budget = None if batch_tokens is None else TokenBudget.read(batch_tokens)
        if budget is not None and budget.padded and cost is not None:
            raise ConfigError(
                f"cost={cost!r} with batch_tokens={budget.tokens} of padded tokens: ranks would have different numbers "
                "of rows, and go beyond the budget; give TokenBudget(padded=False) for batches that are not padded, or "
                "leave out cost="
            )
        return CostArguments(
            cost=None if cost is None else Cost.read(cost),
            bucket=None if bucket is None else Bucket.read(bucket),
            budget=budget,
        )

    def add_to(self, share: Share, opened: OpenIndex) -> Share:
        """Have a share be cut by costs, or made of batches within the budget, as it is asked for.

        Raises:
            DatasetError: an index is missing or damaged; says what to run.
            PartitionError: the budget does not hold the longest sample.
        """
        if self.cost is not None:
            share = replace(share, costs=opened(self.cost))
        if self.budget is not None:
            [costs] = opened(Cost(index=self.budget.index))
            budget = StepBudget.of(self.budget, costs, share.world_size)
            share = replace(share, budget=budget, global_batch_size=budget.usual_rows)
        return share

    def open_bucket(self, opened: OpenIndex) -> Sequence[SampleCosts] | None:
        """Get the costs of each source to bucket by, None where that is not asked for. Raises DatasetError."""
        return None if self.bucket is None else opened(Cost(index=self.bucket.index))
