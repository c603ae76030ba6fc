"""Whole loaders on a device: what they hand out is what they hand out in host memory, of every kind of data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.utils._pytree
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Mixture, Packing, Source
from penstock.loader import ByteViews

DEVICES = [
    None,  # which says that two loaders of one seed are alike
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here"),
        ],
    ),
]
ROWS = 120


def write_tables(folder: Path, first: int = 0) -> str:
    folder.mkdir()
    draw = np.random.default_rng(first)
    numbers = range(first, first + ROWS)
    table = pa.table(
        {
            "number": pa.array(numbers, pa.int32()),
            "flag": pa.array([number % 3 == 0 for number in numbers]),
            "score": pa.array([None if number % 7 == 0 else number / 8 for number in numbers], pa.float32()),
            "text": pa.array([f"row {number}" for number in numbers]),
            "vector": pa.FixedSizeListArray.from_arrays(pa.array(draw.random(ROWS * 4), pa.float32()), 4),
            "tokens": pa.array([list(range(number % 11 + 1)) for number in numbers], pa.list_(pa.int64())),
        }
    )
    for part in range(3):
        pq.write_table(table.slice(part * 40, 40), folder / f"{part}.parquet", row_group_size=16)
    return str(folder)


def rows(folder: Path) -> dict[str, Any]:
    return {"source": write_tables(folder / "rows"), "last_batch": "pad"}


def files(folder: Path) -> dict[str, Any]:
    write_tars(folder / "tars", [30, 21, 40], value_bytes=500)
    return {"source": str(folder / "tars"), "decode": None}


def views(folder: Path) -> dict[str, Any]:
    return {**files(folder), "raw": "view"}


def mixed(folder: Path) -> dict[str, Any]:
    sources = {name: Source(write_tables(folder / name, first), weight=1.0) for name, first in (("a", 0), ("b", 1000))}
    return {"source": Mixture(sources), "columns": ["number", "score"]}


def packed(folder: Path) -> dict[str, Any]:
    return {"source": write_tables(folder / "rows"), "packing": Packing(seq_len=32, eos=12)}


def collated(folder: Path) -> dict[str, Any]:
    return {"source": write_tables(folder / "rows"), "collate": collate, "columns": ["number", "vector"]}


def collate(samples: list[dict[str, Any]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    vectors = [torch.as_tensor(one["vector"]) for one in samples]
    return torch.as_tensor([int(one["number"]) for one in samples]), [torch.stack(vectors), *vectors[:2]]


def host_leaves(batch: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_leaves(batch)
    return [leaf.cpu() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(), other.nan_to_num())
    return bool(one == other)


def read(options: dict[str, Any], device: str | None, state: dict[str, Any] | None = None) -> list[Any]:
    with DistributedDataLoader(**options, device=device) as loader:
        if state is not None:
            loader.load_state_dict(state)
        return list(loader)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("make", [rows, files, views, mixed, packed, collated])
def test_batches_of_every_kind_are_on_the_device_as_they_are_on_the_host(
    tmp_path: Path, make: Callable[[Path], dict[str, Any]], device: str | None
) -> None:
    options = {"batch_size": 1 if make is packed else 8, "shuffle": True, "seed": 3, "with_ids": True, **make(tmp_path)}
    if make is collated:
        options["with_ids"] = False
    expected, found = read(options, None), read(options, device)
    assert len(expected) == len(found) > 2
    for one, other in zip(expected, found, strict=True):
        if make is views:
            one = {name: value.gather() if isinstance(value, ByteViews) else value for name, value in one.items()}
            other = {name: value.gather() if isinstance(value, ByteViews) else value for name, value in other.items()}
        leaves = torch.utils._pytree.tree_leaves(other)
        kinds = {leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)}
        assert kinds == {device or "cpu"}
        pairs = zip(host_leaves(one), host_leaves(other), strict=True)
        assert all(is_same(left, right) for left, right in pairs)


@pytest.mark.parametrize("device", DEVICES)
def test_a_pass_goes_on_from_its_state_on_the_device(tmp_path: Path, device: str | None) -> None:
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "columns": ["number"], **rows(tmp_path)}
    expected = [batch["number"].tolist() for batch in read(options, None)]
    with DistributedDataLoader(**options, device=device) as loader:
        batches = iter(loader)
        taken = [next(batches)["number"].tolist() for _ in range(4)]
        state = loader.state_dict()
    for other in (device, None):
        assert taken + [batch["number"].tolist() for batch in read(options, other, state)] == expected


@pytest.mark.parametrize("device", DEVICES)
def test_batches_that_are_kept_stay_what_they_were(tmp_path: Path, device: str | None) -> None:
    """Whoever hoards batches, or reads them late and on a stream of its own, sees no other batch's numbers."""
    options = {"batch_size": 8, "shuffle": True, "seed": 3, "columns": ["number", "vector"], **rows(tmp_path)}
    expected = read(options, None)
    with DistributedDataLoader(**options, device=device) as loader:
        for _ in range(3):
            kept = []
            for batch in loader:
                if device is not None:
                    torch.cuda._sleep(3_000_000)
                kept.append({name: value * 1 if name == "vector" else value for name, value in batch.items()})
            if loader.epoch == 1:
                for one, other in zip(expected, kept, strict=True):
                    assert torch.equal(one["number"], other["number"].cpu())
                    assert torch.equal(one["vector"], other["vector"].cpu())
