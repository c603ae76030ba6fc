"""The memory limit holds, measured on the process itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tar_dataset import write_tars

MEASURE = """
import json, sys
from penstock import DistributedDataLoader
from penstock.storage.observability.process_usage import peak_resident_bytes as peak
import torch, numpy

options = json.loads(sys.argv[2])
with DistributedDataLoader(sys.argv[1], batch_size=64, decode=None, with_ids=True, last_batch="partial", lanes=16,
                           memory_limit="64MiB") as warm_up:
    next(iter(warm_up))
before = peak()
seen = []
with DistributedDataLoader(sys.argv[1], batch_size=64, decode=None, with_ids=True, last_batch="partial",
                           **options) as loader:
    for batch in loader:
        seen += batch["__id__"].tolist()
    metrics = loader.metrics()
print(json.dumps({"grown": peak() - before, "exact": sorted(seen) == list(range(loader.manifest.num_samples)),
                  "samples": len(seen), **metrics.to_dict()}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """360 MB in 12 shards."""
    folder = tmp_path_factory.mktemp("large")
    write_tars(folder, [300] * 12, value_bytes=100_000)
    return folder


def measure(folder: Path, **options: object) -> dict[str, object]:
    command = [sys.executable, "-c", MEASURE, str(folder), json.dumps(options)]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_lanes_of_64_ranks_on_one_rank_stay_inside_the_memory_limit(large):
    limit = 96 << 20
    measured = measure(large, lanes=256, memory_limit=limit)
    assert measured["exact"]
    assert measured["evicted_chunks"] > 0  # the open windows are larger than the limit: it was put to the test
    assert measured["grown"] <= limit


@pytest.mark.full
def test_the_footers_of_thousands_of_parquet_shards_stay_bounded(tmp_path: Path) -> None:
    first = tmp_path / "00000.parquet"
    pq.write_table(pa.table({f"column_{i}": np.arange(i, i + 8) for i in range(12)}), first, row_group_size=2)
    for number in range(1, 3_000):  # all footers together would take 210 MB and more
        os.link(first, tmp_path / f"{number:05}.parquet")
    limit = 64 << 20
    measured = measure(tmp_path, lanes=16, memory_limit=limit)
    assert measured["exact"]
    assert measured["evicted_headers"] > 0
    assert measured["grown"] <= 2 * limit  # malloc keeps about as much of the small blocks that were freed
