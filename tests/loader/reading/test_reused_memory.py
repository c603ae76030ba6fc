"""Chunks are read into memory that earlier ones lay in, and nothing that a user keeps changes by that."""

from __future__ import annotations

import gc
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.loader import DistributedDataLoader, pack
from penstock.storage import CacheStore, LocalStore, MemoryStore, ShortReadError
from penstock.storage.memory import buffers
from penstock.storage.memory.buffers import BUFFERS

SAMPLES, VALUE_BYTES = 900, 20_000
# Less than the data, of which chunks are 1.2 and 4 MB.
LIMITED: dict[str, Any] = {"memory_limit": "18MB", "lanes": 2, "window": 1, "piece": 0, "batch_size": 16, "seed": 3}


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
    for first in range(0, SAMPLES, 450):
        table = pa.table({"bin": pa.array([value_of(i) for i in range(first, first + 450)], pa.binary())})
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


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kept", "kind"), [*((kept, "tars") for kept in KEPT), ("views", "arrow_files"), ("Arrow arrays", "arrow_files")]
)
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
            numbers = np.frombuffer(np.ascontiguousarray(found), np.uint32)
            assert len(numbers)
            assert (numbers == sample_id).all()


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


@pytest.mark.slow
def test_an_interrupt_is_not_lost_while_the_last_views_end(tars: Path) -> None:
    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    def let_go() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.001)
        held.clear()  # the numbers first, which takes longer than that; then the views
        time.sleep(5)  # unless the interrupt comes

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with DistributedDataLoader(str(tars), decode=None, raw="view", **LIMITED) as loader:
            held = [*(batch["bin"] for batch in loader), list(map(float, range(1_000_000)))]
            with pytest.raises(KeyboardInterrupt):
                let_go()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_entries_of_the_disk_cache_lie_in_reused_memory(memory_store: MemoryStore, tmp_path: Path) -> None:
    """Several MB each, in turn; what is kept of one is not written over, and a damaged one is fetched again."""
    contents = {f"{i}": bytes([i]) * 3_000_000 for i in range(4)}
    for key, data in contents.items():
        memory_store.put(key, data)
    allowance = BUFFERS.allow()
    allowance.set(1 << 30)
    try:
        store = CacheStore(memory_store, tmp_path, 10**9)
        for key in contents:
            store.get(key)
        kept = {key: store.get(key)[::-1000] for key in contents}
        for key, data in contents.items():
            view = store.get(key)
            assert (view.readonly, view == data) == (True, True)
            assert bytes(kept[key]) == data[::-1000]
        assert store.counts.hits == 8
        for entry in tmp_path.glob("uid-*/v1/entries/*/*"):
            os.truncate(entry, 2_000_000)
        assert {key: bytes(store.get(key)) for key in contents} == contents
        assert (store.counts.corrupt, store.counts.misses) == (4, 8)
        store.close()
    finally:
        allowance.close()


def test_a_file_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x").write_bytes(bytes(3_000_000))
    store, read = LocalStore(tmp_path), os.preadv

    def shrink(fd: int, into: list[Any], at: int) -> int:
        os.truncate(tmp_path / "x", 2_000_000)
        return read(fd, into, at)

    monkeypatch.setattr(os, "preadv", shrink)
    with pytest.raises(ShortReadError, match=r"3,?000,?000"):
        store.get("x")
