"""Chunks are read into memory that earlier ones lay in, and nothing that a user keeps changes by that."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.loader import DistributedDataLoader, pack
from penstock.storage import buffers
from penstock.storage.buffers import BUFFERS

SAMPLES, VALUE_BYTES = 1200, 20_000
# Less than the data, of which chunks are 1.2 and 4 MB.
LIMITED: dict[str, Any] = {"memory_limit": "18MB", "lanes": 2, "window": 1, "batch_size": 16, "seed": 3}


def value_of(sample_id: int) -> bytes:
    return np.full(VALUE_BYTES // 4, sample_id, np.uint32).tobytes()


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tars")
    samples = ({"__key__": f"{i:05d}", "bin": value_of(i)} for i in range(SAMPLES))
    pack(samples, folder, format="tar", shard_bytes=8 << 20, progress=False)
    return folder


@pytest.fixture(scope="module")
def arrow_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrow")
    for first in range(0, SAMPLES, 600):
        table = pa.table({"bin": pa.array([value_of(i) for i in range(first, first + 600)], pa.binary())})
        with pa.ipc.new_file(folder / f"{first:05d}.arrow", table.schema) as writer:
            writer.write_table(table, max_chunksize=60)
    return folder


@pytest.fixture
def mapped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The capacities of all buffers that were made anew."""
    made: list[int] = []
    begin = buffers._Region.__init__

    def note(self: buffers._Region, capacity: int) -> None:
        made.append(capacity)
        begin(self, capacity)

    monkeypatch.setattr(buffers._Region, "__init__", note)
    return made


def view_its_input(data: Any) -> Any:
    return np.frombuffer(data, np.uint32)[10:20]


def as_it_is(samples: list[dict[str, Any]]) -> dict[str, Any]:
    ids = np.array([sample["__id__"] for sample in samples])
    return {"__id__": ids, "bin": [sample["bin"] for sample in samples]}


KEPT: dict[str, tuple[dict[str, Any], Callable[[Any], Any]]] = {
    "bytes": ({"decode": None}, list),
    "views": ({"decode": None, "raw": "view"}, list),
    "slices of arrays over views": (
        {"decode": None, "raw": "view"},
        lambda values: [np.frombuffer(value, np.uint32)[1::7] for value in values],
    ),
    "Arrow arrays": ({"decode": None, "raw": "view"}, lambda values: values.arrow()),
    "gathered": (
        {"decode": None, "raw": "view"},
        lambda values: [values.gather().data.numpy().reshape(len(values), -1)[i] for i in range(len(values))],
    ),
    "what decoders made of their input": ({"decode": {"bin": view_its_input}, "collate": as_it_is}, list),
    "what decoders made of views": ({"decode": {"bin": view_its_input}, "collate": as_it_is, "raw": "view"}, list),
}


@pytest.mark.parametrize("kind", ["tars", "arrow_files"])
@pytest.mark.parametrize("kept", KEPT)
def test_what_a_user_keeps_never_changes(kept: str, kind: str, request: pytest.FixtureRequest) -> None:
    options, keep = KEPT[kept]
    held: list[tuple[list[int], Any]] = []
    with DistributedDataLoader(str(request.getfixturevalue(kind)), with_ids=True, **LIMITED, **options) as loader:
        for _ in range(2):
            for number, batch in enumerate(loader):
                if number % 7 == 0:  # of each chunk some, while others go on being read
                    held.append((batch["__id__"].tolist(), keep(batch["bin"])))
    assert len(held) > 15
    for ids, values in held:
        for sample_id, value in zip(ids, values, strict=True):
            found = value.as_buffer() if isinstance(value, pa.Scalar) else value
            assert set(np.frombuffer(np.ascontiguousarray(found), np.uint32).tolist()) == {int(sample_id)}


def test_memory_is_reused_within_the_budget_and_given_back_at_the_end(tars: Path, mapped: list[int]) -> None:
    gc.collect()  # what other tests left
    before = BUFFERS.lent_bytes
    most = 0
    with DistributedDataLoader(str(tars), decode=None, **LIMITED) as loader:
        for _ in range(2):
            for batch in loader:
                most = max(most, BUFFERS.lent_bytes + BUFFERS.idle_bytes - before)
                assert len(batch["bin"]) == 16
        fetched = loader.metrics().fetched_chunks
    assert len(mapped) < fetched / 2
    assert most <= 18_000_000
    assert BUFFERS.idle_bytes == 0
    gc.collect()
    assert BUFFERS.lent_bytes == before
