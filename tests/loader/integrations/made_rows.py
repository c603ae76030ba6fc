"""The data set of these tests, and what a run over it must have delivered."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from penstock import pack

ROWS = 120


def write_rows(folder: Path) -> None:
    """Rows of x and y in parquet, in several shards."""
    rows = ({"x": i / ROWS, "y": 2 * i / ROWS} for i in range(ROWS))
    pack(rows, str(folder), format="parquet", shard_bytes=500, progress=False)


def once_an_epoch(steps: Sequence[Sequence[int]], epochs: int) -> bool:
    """Whether steps of equal size deliver every row once in each of so many epochs."""
    per_epoch, left = divmod(len(steps), epochs)
    parts = [steps[epoch * per_epoch :][:per_epoch] for epoch in range(epochs)]
    seen = [Counter(i for ids in part for i in ids) for part in parts]
    return not left and all(counts == Counter(range(ROWS)) for counts in seen)
