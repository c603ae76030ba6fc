"""Users' functions change samples in place: each delivered sample was changed once, and no other one by it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock.loader import DistributedDataLoader

SAMPLES = 17  # the last batch of 8 has one, and most ranks none of it


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of each sample a vector and a list, both of its id."""
    folder = tmp_path_factory.mktemp("rows")
    ids = np.arange(SAMPLES)
    table = {
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.repeat(ids, 4).astype(np.float32)), 4),
        "list": pa.array([[i] for i in ids.tolist()]),
    }
    pq.write_table(pa.table(table), folder / "rows.parquet")
    return str(folder)


def change(sample: dict[str, Any]) -> dict[str, Any]:
    sample["vector"] += 1000
    sample["list"].append(-1)
    return sample


def change_all(samples: list[dict[str, Any]]) -> dict[str, Any]:
    changed = [change(sample) for sample in samples]
    return {
        "__id__": torch.tensor([sample["__id__"] for sample in changed]),
        "vector": torch.from_numpy(np.stack([sample["vector"] for sample in changed]))
        if changed
        else torch.empty(0, 4),
        "list": [sample["list"] for sample in changed],
    }


def fail_for_some(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["list"][0] % 3 == 0:
        raise ValueError("of no use")
    return sample


CHANGES: dict[str, dict[str, Any]] = {
    "transform": {"transform": change},
    "collate": {"collate": change_all},
    "collate of what may be dropped": {"transform": dict, "may_drop": True, "collate": change_all},
    "collate of replaced samples": {
        "transform": fail_for_some,
        "on_error": "replace",
        "max_errors": SAMPLES,
        "collate": change_all,
    },
}
SHARED = [*((changes, 1) for changes in CHANGES), ("transform", 4), ("collate", 4)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("changes", "world_size"), SHARED)
@pytest.mark.parametrize("last_batch", ["pad", "partial"])
@pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")
def test_each_sample_is_changed_once(rows: str, changes: str, world_size: int, last_batch: Any) -> None:
    share: dict[str, Any] = {"global_batch_size": 8, "last_batch": last_batch, "world_size": world_size}
    for rank in range(world_size):
        with DistributedDataLoader(rows, rank=rank, seed=1, with_ids=True, **share, **CHANGES[changes]) as loader:
            for batch in (batch for _ in range(2) for batch in loader):
                ids = batch["__id__"]
                assert torch.equal(batch["vector"], (ids[:, None] + 1000).expand(-1, 4).float())
                assert batch["list"] == [[i, -1] for i in ids.tolist()]
