"""Small data sets to mix, what ranks get of a mixture, and a naive reference of its order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import DistributedDataLoader, Manifest, Mixture, open_manifest
from penstock.loader.order.forecast import batch_ids
from penstock.loader.order.plan import EpochPlan, Order

Sample = tuple[int, int]  # source, sample id


def write_rows(folder: Path, sizes: Sequence[int], first: int = 0, row_group: int = 7, **columns: Any) -> Manifest:
    """Parquet shards of these numbers of rows, with the column n: ``first`` and so on."""
    folder.mkdir(parents=True)
    for number, size in enumerate(sizes):
        table = {"n": np.arange(first, first + size), **{name: make(size) for name, make in columns.items()}}
        pq.write_table(pa.table(table), folder / f"{number:03d}.parquet", row_group_size=row_group)
        first += size
    return open_manifest(folder)


def deliver(
    mixture: Mixture | Manifest,
    world_size: int,
    *,
    global_batch_size: int,
    steps: int | None = None,
    state: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[list[list[Sample]], dict[str, Any]]:
    """The samples of each global batch, sorted, as all ranks together get them, and the state after the last.

    Without ``steps``, those of one pass. Checks that ranks have equal batches and equal states.
    """
    by_rank, states = [], []
    for rank in range(world_size):
        with DistributedDataLoader(
            mixture,
            global_batch_size=global_batch_size,
            rank=rank,
            world_size=world_size,
            with_ids=True,
            threads=1,
            **options,
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            by_rank.append(list(take(loader, steps)))
            states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    assert {len(batch) for batches in by_rank for batch in batches} <= {global_batch_size // world_size}
    return [sorted(sample for part in parts for sample in part) for parts in zip(*by_rank, strict=True)], states[0]


def take(loader: DistributedDataLoader, steps: int | None) -> Iterator[list[Sample]]:
    """The samples of some batches, over the ends of epochs."""
    while steps is None or steps:
        for batch in loader:
            yield list(zip(batch["__source__"].tolist(), batch["__id__"].tolist(), strict=True))
            if steps is not None:
                steps -= 1
                if not steps:
                    return
        if steps is None:
            return


def reference(
    manifests: Sequence[Manifest], state: dict[str, Any], weights: Sequence[float], size: int, steps: int
) -> list[list[Sample]]:
    """Each global batch of a run from its beginning on, sorted, told by one sample after another."""
    endless = [_sequence(manifest, state, k) for k, manifest in enumerate(manifests)]
    edges = [Fraction(0)]
    for weight in weights:
        edges.append(edges[-1] + Fraction(weight) / sum(map(Fraction, weights)))
    batches = []
    for step in range(steps):
        mark = Fraction(step * 2654435769 % (1 << 32), 1 << 32)
        counts = np.diff([int(size * edge + mark) for edge in edges])
        batches.append(sorted((k, next(endless[k])) for k, count in enumerate(counts) for _ in range(count)))
    return batches


def _sequence(manifest: Manifest, state: dict[str, Any], number: int) -> Iterator[int]:
    """A source's sample ids, epoch after epoch, in the order that a state tells."""
    own = state["sources"][number]
    order = Order(lanes=state["lanes"], **{name: own[name] for name in ("seed", "window", "piece")})
    epoch = 0
    while True:
        plan = EpochPlan(manifest.samples, order, epoch)
        for position in range(plan.num_samples):
            yield int(batch_ids(plan, manifest.first_ids, position, 1)[0])
        epoch += 1
