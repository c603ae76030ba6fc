"""The part of ``penstock plan`` that is about costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..loader.columns import IntArray
from ..loader.dataset.cost_index import open_costs
from ..loader.dataset.index import open_manifest
from ..loader.errors import ConfigError, PartitionError
from ..loader.order.costs.buckets import Bucket, add_buckets, plan_epoch
from ..loader.order.costs.budget import StepBudget, TokenBudget
from ..loader.order.costs.costs import Cost, SampleCosts
from ..loader.order.costs.forecast import CostForecast, forecast_costs
from ..loader.order.forecast import Forecast
from ..loader.order.plan import EpochPlan, Order
from .common import SourceArguments, in_option_words
from .screen import console, print_columns, wrapped

_ROWS: tuple[tuple[str, Callable[[CostForecast], str]], ...] = (
    ("costliest rank beside the mean", lambda c: f"× {c.skew:.3f}"),
    ("the same, cut by cost", lambda c: f"× {c.skew_by_cost:.3f}"),
    ("padding", lambda c: f"{c.padding:.1%}"),
    ("padding, bucketed", lambda c: f"{c.bucket_padding:.1%}"),
    ("runs and pools of buckets", lambda c: f"{c.bucket_run:,} / {c.bucket_pool:,}"),
)
_BUDGET_ROWS: tuple[tuple[str, Callable[[CostForecast], str]], ...] = (
    ("batches by tokens, bucketed", lambda c: f"{c.budget_batches:,}"),
    ("their padding", lambda c: f"{c.budget_padding or 0.0:.1%}"),
)


def refuse_made_up(is_made_up: bool) -> None:
    """Raise ConfigError where costs are asked for of samples that no index can have."""
    if is_made_up:
        raise ConfigError("--cost is of an existing data set's samples, all of them; leave out --share and --samples")


def open_named_costs(given: SourceArguments, name: str) -> SampleCosts:
    """The index of costs of the data set that a command was given."""
    source, options = given.chosen_source(), given.options()
    manifest = open_manifest(source, split=given.chosen_split(), storage_options=options, format=given.chosen_format())
    return open_costs(manifest, Cost(index=name), storage_options=options)


def costs_of_run(
    chunk_samples: IntArray, costs: SampleCosts, run: Forecast, *, shuffle: bool, batch_tokens: int | None
) -> CostForecast | str:
    """Forecast the costs of a run, or explain why there can be no such run."""
    if run.samples < run.global_batch_size:
        return f"on {run.world_size:,} ranks no batch is full"
    order = Order(seed=0, shuffle=shuffle, lanes=run.lanes, window=run.window, piece=run.piece)
    window = run.window * (run.piece or run.samples / run.chunks)
    size = run.global_batch_size
    bucketed = add_buckets(order, Bucket(), costs, global_batch_size=size, window_samples=window)
    try:
        forecasts = None if batch_tokens is None else TokenBudget(tokens=batch_tokens)
        budget = None if forecasts is None else StepBudget.of(forecasts, costs, run.world_size)
    except PartitionError as exc:
        return in_option_words(str(exc))
    return forecast_costs(
        EpochPlan(chunk_samples, order, 0),
        plan_epoch(chunk_samples, bucketed, 0, None, costs),
        costs,
        world_size=run.world_size,
        global_batch_size=size,
        bucket=(bucketed.run * run.lanes, bucketed.pool * run.lanes),
        budget=budget,
    )


def report_costs(name: str, forecasts: Sequence[CostForecast | str]) -> None:
    """Print a column for each number of ranks, and why others have none."""
    screen = console()
    found = [each for each in forecasts if isinstance(each, CostForecast)]
    screen.print()
    if found:
        rows = (*_ROWS, *(_BUDGET_ROWS if found[0].budget_batches is not None else ()))
        labels = [f"costs {name!r}, ranks", *(label for label, _ in rows)]
        print_columns(screen, labels, [[f"{c.world_size:,}", *(show(c) for _, show in rows)] for c in found])
    for reason in dict.fromkeys(each for each in forecasts if isinstance(each, str)):
        for line in wrapped(f"costs {name!r}: {reason}", screen.width):
            screen.print(line)
