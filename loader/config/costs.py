"""The loader's arguments about costs, checked, and read with the indexes that they name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError

if TYPE_CHECKING:
    from ..dataset.manifest import Manifest
    from ..order.costs.buckets import Bucket
    from ..order.costs.budget import TokenBudget
    from ..order.costs.costs import Cost, SampleCosts
    from ..order.plan import Share


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
        from ..order.costs.buckets import Bucket
        from ..order.costs.budget import TokenBudget
        from ..order.costs.costs import Cost

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

    def open(
        self,
        manifest: Manifest,
        share: Share,
        *,
        storage_options: Mapping[str, Any] | None,
        cache_dir: str | os.PathLike[str] | None,
    ) -> tuple[Share, SampleCosts | None]:
        """Read the indexes beside the manifest: return the share with its costs, and the costs to bucket by.

        Raises:
            DatasetError: an index is missing or damaged; says what to run.
            PartitionError: the budget does not hold the longest sample.
        """
        if self.cost is None and self.budget is None and self.bucket is None:
            return share, None
        from ..dataset.cost_index import open_costs
        from ..order.costs.budget import StepBudget
        from ..order.costs.costs import Cost

        opened = partial(open_costs, manifest, storage_options=storage_options, cache_dir=cache_dir)
        if self.cost is not None:
            share = replace(share, costs=opened(self.cost))
        if self.budget is not None:
            budget = StepBudget.of(self.budget, opened(Cost(index=self.budget.index)), share.world_size)
            share = replace(share, budget=budget, global_batch_size=budget.usual_rows)
        return share, None if self.bucket is None else opened(Cost(index=self.bucket.index))
