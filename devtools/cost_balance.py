"""Measure what costs do for ranks and padding: log-normal lengths, 4 to 64 ranks, equal shares against cut ones.

python -m devtools cost_balance [RESULT.json]

Arithmetic over a made-up data set, without data: 262,144 documents in 1,024 chunks, whose lengths in tokens are
log-normal (mu 6, sigma 1, up to 8,192), 32 documents a rank and batch, 16,384 padded tokens where those decide. Numbers
but for times do not depend on the machine.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from penstock.benchmarks.machine import describe_machine
from penstock.loader.order.costs.buckets import Bucket, add_buckets, plan_epoch
from penstock.loader.order.costs.budget import StepBudget, TokenBudget
from penstock.loader.order.costs.costs import Cost, SampleCosts
from penstock.loader.order.costs.forecast import count_reads, forecast_costs
from penstock.loader.order.plan import EpochPlan, Order, Share, auto_lanes, auto_window
from penstock.loader.order.spans import EpochSpans

from .arguments import make_parser

_SAMPLES, _CHUNKS, _LONGEST = 1 << 18, 1 << 10, 8192
_WORLDS = (4, 8, 16, 32, 64)
_BATCH, _TOKENS = 32, 16_384
_TIMED_STEPS = 32
_WAYS = ("equal", "by_cost", "bucketed", "bucketed_by_cost")
_READ_WORLDS = (4, 12, 16)  # counting reads plans the whole epoch on every rank


def make_costs(cost: Cost) -> SampleCosts:
    lengths = np.random.default_rng(0).lognormal(6, 1, _SAMPLES)
    return SampleCosts(np.clip(lengths, 1, _LONGEST).astype(np.uint16), "0" * 16, cost)


def measure(world_size: int) -> dict[str, Any]:
    """Measure skew, padding and reads on this many ranks, and the time that a rank takes to plan a step."""
    linear = make_costs(Cost())
    quadratic = make_costs(Cost(model="quadratic", hidden_size=1024))
    sizes = np.full(_CHUNKS, _SAMPLES // _CHUNKS, np.int64)
    lanes = auto_lanes(shuffle=True, world_size=world_size)
    order = Order(lanes=lanes, window=auto_window(lanes=lanes, mean_chunk_bytes=float(1 << 22)))
    size = _BATCH * world_size
    window = float(order.window * sizes[0])
    bucketed = add_buckets(order, Bucket(), linear, global_batch_size=size, window_samples=window)
    plans = EpochPlan(sizes, order, 0), plan_epoch(sizes, bucketed, 0, None, linear)
    row: dict[str, Any] = {"world_size": world_size, "lanes": lanes, "window": order.window}
    for name, costs in (("linear", linear), ("quadratic", quadratic)):
        found = forecast_costs(
            *plans,
            costs,
            world_size=world_size,
            global_batch_size=size,
            bucket=(bucketed.run * lanes, bucketed.pool * lanes),
            budget=StepBudget.of(TokenBudget(tokens=_TOKENS), linear, world_size) if costs is linear else None,
        )
        row[name] = asdict(found)
    ways = {
        "equal": (plans[0], None),
        "by_cost": (plans[0], linear),
        "bucketed": (plans[1], None),
        "bucketed_by_cost": (plans[1], linear),
    }
    for name, (plan, cut_by) in ways.items():
        row[f"plan_us_a_step_{name}"] = _time_planning(plan, world_size, size, cut_by)
        if world_size in _READ_WORLDS:
            row[f"reads_{name}"] = count_reads(plan, world_size=world_size, global_batch_size=size, costs=cut_by)
    return row


def _time_planning(plan: EpochPlan, world_size: int, size: int, costs: SampleCosts | None) -> float:
    spans = EpochSpans(plan, Share(world_size // 2, world_size, size, costs=None if costs is None else (costs,)))
    spans.expand(spans.plan_span(0, 1)[0])  # the first windows
    started = time.perf_counter()
    spans.expand(spans.plan_span(size, _TIMED_STEPS)[0])
    return (time.perf_counter() - started) / _TIMED_STEPS * 1e6


def show_grid(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print()


def report(rows: list[dict[str, Any]]) -> None:
    header = ("ranks", "skew", "by cost", "bucketed", "n² skew", "by cost", "padding", "bucketed", "budget")
    cells = []
    for row in rows:
        linear, quadratic = row["linear"], row["quadratic"]
        skews = [f"{linear[name]:.3f}" for name in ("skew", "skew_by_cost", "bucket_skew")]
        skews += [f"{quadratic[name]:.3f}" for name in ("skew", "skew_by_cost")]
        padding = [f"{linear[name]:.1%}" for name in ("padding", "bucket_padding", "budget_padding")]
        cells.append([str(row["world_size"]), *skews, *padding])
    show_grid(header, cells)
    reads = [
        [str(row["world_size"]), *(f"{row[f'reads_{name}']:.2f}" for name in _WAYS)]
        for row in rows
        if "reads_equal" in row
    ]
    show_grid(("ranks", "reads a chunk", "by cost", "bucketed", "both"), reads)


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("result", nargs="?", type=Path, metavar="RESULT.json", help="write the numbers here, too")
    result_path: Path | None = parser.parse_args(arguments).result
    worlds = sorted({*_WORLDS, *_READ_WORLDS})
    rows = [measure(world_size) for world_size in worlds]
    report(rows)
    if result_path is not None:
        result = {
            "command": "python -m devtools cost_balance",
            "about": (__doc__ or "").split("\n\n")[-1].strip(),
            "machine": describe_machine(),
            "rows": rows,
        }
        result_path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
