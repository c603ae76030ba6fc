"""``print(loader.describe())`` shows the pipe, a line a stage, with what was chosen and why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader
from penstock.loader import Mixture, Packing, Source, Subset


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("web", "code"):
        (tmp_path / name).mkdir()
        table = pa.table({"n": np.arange(50), "tokens": [list(range(5))] * 50})
        pq.write_table(table, tmp_path / name / "part-0.parquet", row_group_size=7)
    return tmp_path


def augment(sample: dict[str, Any]) -> dict[str, Any]:
    return sample


def stages(source: object, **options: Any) -> dict[str, str]:
    given = {"batch_size": 4, "rank": 0, "world_size": 1, **options}
    with DistributedDataLoader(source, **given) as loader:  # type: ignore[arg-type]
        text = loader.describe()
        assert loader.metrics().fetched_chunks == 0
    return {line[:11].strip(): line[11:] for line in text.splitlines()}


def test_a_plain_loader_is_described_in_eight_lines_in_the_order_of_the_pipe(folder: Path) -> None:
    found = stages(str(folder / "web"))
    assert list(found) == ["source", "order", "read", "open", "decode", "batch", "queue", "place", "device"]
    assert found["source"].startswith(f"{folder}/web/: 50 samples in 1 chunk of 1 shard, ")
    assert found["source"].endswith(" of parquet")
    assert found["order"].startswith("shuffled by seed 0, in 16 lanes ('auto': 4 a rank, at least 16), windows of ")
    assert found["open"] == "parquet: n, tokens"
    assert found["decode"].startswith("by extension and type ('auto'), on ")
    assert found["batch"] == "4 samples by column; 12 batches an epoch, last_batch='drop'"
    assert found["device"] == "none: batches stay in host memory"


def test_what_was_given_is_told_from_what_was_chosen(folder: Path) -> None:
    options = {
        "rank": 1,
        "world_size": 2,
        "lanes": 32,
        "window": 3,
        "piece": 0,
        "threads": 3,
        "fetch_threads": 5,
        "autotune": False,
        "memory_limit": "1GiB",
        "read_ahead": "1MiB",
        "columns": ["n"],
        "decode": {"tokens": None},
        "last_batch": "pad",
        "on_error": "replace",
        "transform": augment,
        "seed": 9,
        "cache_dir": folder / "cache",
        "subset": Subset.take(20, seed=1),
    }
    options["decode"] = None
    found = stages(str(folder / "web"), **options)
    assert found["source"].startswith(f"{folder}/web/: 20 of 50 samples")
    assert found["order"] == "shuffled by seed 9, in 32 lanes (as given), windows of 3 chunks (as given)"
    assert found["read"] == (
        "5 chunks at a time from local files (as given), 1 MiB ahead (as given), within 1 GiB of memory (as given), "
        f"kept in {folder}/cache"
    )
    assert found["decode"] == "nothing, values stay as stored (decode=None), on 3 threads (as given)"
    assert found["transform"] == "augment, there too"
    assert found["batch"] == (
        "4 samples a rank, 8 on all 2 by column; 3 batches an epoch, last_batch='pad'; bad samples are replaced"
    )


def test_streams_and_mixtures_are_described_with_their_own_stages(folder: Path) -> None:
    packing = Packing(seq_len=8, field="tokens")
    found = stages(str(folder / "web"), shuffle=False, packing=packing, keep=lambda sample: True)
    assert found["order"] == "as stored (shuffle=False), in one lane"
    assert {"keep", "pack"} < set(found)
    assert found["batch"] == "4 samples by column; how many an epoch has, reading tells"
    web = Source(str(folder / "web"), weight=3, transform=augment)
    given = {"batch_size": 4, "rank": 0, "world_size": 1, "processes": 0}
    with DistributedDataLoader(Mixture({"web": web, "code": Source(str(folder / "code"))}), **given) as loader:
        first, second, *others = loader.describe().splitlines()
        assert first.startswith("source     web (75.0% of samples): 50 samples in ")
        assert second.startswith("source     code (25.0% of samples): 50 samples in ")
        assert "transform  augment or none, there too" in others
        loader.set_weights({"web": 1})
        assert "web (50.0% of samples)" in loader.describe()
