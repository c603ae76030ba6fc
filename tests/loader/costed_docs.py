"""Documents of uneven lengths, and an index of their costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock import DistributedDataLoader, open_manifest
from penstock.loader import (
    CostExpression,
    index_costs,
    write_costs,
)

SAMPLES = 1100
LENGTHS = np.minimum(np.random.default_rng(0).lognormal(5, 1, SAMPLES).astype(np.int64) + 1, 2000)


def write_docs(folder: Path) -> str:
    """Nine shards of the documents, with an index of their tokens; returns the folder."""
    for shard, part in enumerate(np.array_split(np.arange(SAMPLES), 9)):
        lengths = LENGTHS[part]
        columns = {"tokens": lengths.astype(np.int32), "text": ["é" * n for n in lengths], "n": part.astype(np.int64)}
        pq.write_table(pa.table(columns), folder / f"{shard}.parquet", row_group_size=40)
    write_index(folder, "tokens")
    return str(folder)


def write_index(folder: Path | str, *expressions: str) -> None:
    manifest = open_manifest(str(folder), progress=False)
    for text in expressions:
        expression = CostExpression.parse(text)
        write_costs(manifest, expression, index_costs(manifest, expression, progress=False))


def make_loader(docs: str, rank: int = 0, world_size: int = 1, **options: Any) -> DistributedDataLoader:
    defaults: dict[str, Any] = {"columns": ["n"], "with_ids": True, "last_batch": "partial"}
    return DistributedDataLoader(docs, rank=rank, world_size=world_size, **{**defaults, **options})
