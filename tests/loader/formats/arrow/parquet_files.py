"""Parquet files of many types, and their values."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from folder_store import FolderStore


def write(store: FolderStore, key: str, table: pa.Table, **options: object) -> None:
    pq.write_table(table, store.root / key, **options)


def mixed_table(rows: int, seed: int = 0) -> pa.Table:
    rng = np.random.default_rng(seed)
    numbers = rng.integers(-1000, 1000, rows)
    return pa.table(
        {
            "id": pa.array(np.arange(rows, dtype=np.int64)),
            "small": pa.array(rng.integers(0, 255, rows, dtype=np.uint8)),
            "half": pa.array(rng.random(rows).astype(np.float16)),
            "flag": pa.array(rng.random(rows) < 0.5),
            "name": pa.array([None if n % 7 == 0 else "é" * (n % 5) for n in numbers]),
            "raw": pa.array([bytes([n % 256]) * (n % 9) for n in numbers], pa.binary()),
            "list": pa.array([None if n % 5 == 0 else [int(n)] * (n % 3) for n in numbers], pa.list_(pa.int32())),
            "map": pa.array([[(str(n), int(n))] for n in numbers], pa.map_(pa.string(), pa.int32())),
            "struct": pa.array([{"x": int(n), "y": {"z": str(n)}} for n in numbers]),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(rows * 4, dtype=np.float32)), 4),
            "when": pa.array(numbers, pa.timestamp("us", tz="UTC")),
            "city": pa.array([f"c{n % 10}" for n in numbers]).dictionary_encode(),
        }
    )
