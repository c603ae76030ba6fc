"""What several ranks, as threads of one process, get of a mixture of which sources filter or pack."""

from __future__ import annotations

import itertools
import json
from typing import Any

from stream_reference import Output
from streams_ranks import ThreadRanks

from penstock import DistributedDataLoader, Mixture


def outputs_of(batch: dict[str, Any]) -> list[tuple[int, Output]]:
    """What a rank got: each row's source, with its sample id or its tokens."""
    sources = batch["__source__"].tolist()
    if "tokens" not in batch:
        assert batch["n"].tolist() == batch["__id__"].tolist()
        return list(zip(sources, batch["__id__"].tolist(), strict=True))
    rows = zip(batch["tokens"].tolist(), batch["document_ids"].tolist(), strict=True)
    return [(k, tuple(t for t, i in zip(*row, strict=True) if i >= 0)) for k, row in zip(sources, rows, strict=True)]


def run_leg(
    mixture: Mixture, world_size: int, steps: int, state: dict[str, Any] | None, **options: Any
) -> tuple[list[tuple[int, list[tuple[int, Output]]]], dict[str, Any]]:
    """Epochs and global batches of some steps, over the ends of epochs, and the state that all ranks have then."""

    def run(loader: DistributedDataLoader) -> Any:
        if state is not None:
            loader.load_state_dict(json.loads(json.dumps(state)))
        got: list[Any] = []
        while len(got) < steps:
            got.extend((loader.epoch, outputs_of(batch)) for batch in itertools.islice(loader, steps - len(got)))
        return got, loader.state_dict()

    results = ThreadRanks(world_size, mixture, with_ids=True, threads=1, **options).run(run)
    for result in results:
        if isinstance(result, Exception):
            raise result
    assert all(ended == results[0][1] for _, ended in results)
    parts = zip(*(got for got, _ in results), strict=True)
    found = [(of_ranks[0][0], sorted(row for _, rows in of_ranks for row in rows)) for of_ranks in parts]
    return found, results[0][1]
