"""``peek`` is the first batch of the next pass, whenever it is called, and leaves nothing behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader import BadChunkWarning, ConfigError, DecodeError, FormatError, LoaderClosedError

SAMPLES = 100


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [30, 45, 25])
    return str(folder)


def draw(data: bytes, rng: np.random.Generator) -> list[int]:
    return [*data[:2], *rng.integers(0, 1000, 4).tolist()]


def add_noise(sample: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {**sample, "noise": rng.random(3)}


def load(source: str, **options: Any) -> DistributedDataLoader[Any]:
    given = {"batch_size": 10, "with_ids": True, "rank": 0, "world_size": 1, "decode": {"bin": draw}}
    return DistributedDataLoader(source, **{**given, "transform": add_noise, **options})


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        assert same, name


def peek_and_check(loader: DistributedDataLoader[Any]) -> dict[str, Any]:
    """A peek that changed nothing that can be seen."""
    state, metrics, threads = loader.state_dict(), loader.metrics(), set(threading.enumerate())
    batch = loader.peek()
    assert type(batch) is dict
    assert loader.state_dict() == state
    assert loader.metrics().batches == metrics.batches
    assert {thread for thread in started_threads() if thread.name == "penstock-look"} == set()
    if not any(thread.name == "penstock-assemble" for thread in threads):
        assert set(threading.enumerate()) == threads
    return batch


def test_a_peek_before_the_first_pass_is_its_first_batch_and_starts_no_pipeline(tars: str) -> None:
    with load(tars) as loader:
        looked = peek_and_check(loader)
        assert loader.metrics().fetched_chunks == 0
        assert_same(looked, peek_and_check(loader))
        assert_same(looked, next(iter(loader)))


@pytest.mark.slow
@pytest.mark.parametrize("at_step", [1, 5, 10])
def test_a_peek_in_mid_pass_consumes_nothing_and_shows_where_a_pass_would_begin(tars: str, at_step: int) -> None:
    with load(tars) as loader:
        expected = list(loader)
        following = next(iter(loader))
    with load(tars) as loader:
        seen = []
        looked: dict[str, Any] = {}
        for step, batch in enumerate(loader, start=1):
            seen.append(batch)
            if step == at_step:
                looked = peek_and_check(loader)
        for one, other in zip(seen, expected, strict=True):
            assert_same(one, other)
        assert_same(looked, following if at_step == 10 else expected[0])  # after the last batch comes the next epoch
        assert_same(peek_and_check(loader), following)


def test_a_peek_follows_loaded_states_epochs_and_shares(tars: str) -> None:
    with load(tars) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        state, fourth = loader.state_dict(), next(batches)
    with load(tars) as loader:
        loader.load_state_dict(state)
        assert_same(peek_and_check(loader), fourth)
        assert_same(next(iter(loader)), fourth)
        loader.set_epoch(5)
        assert_same(peek_and_check(loader), next(iter(loader)))
        loader.set_epoch(6)
        loader.set_shares([2.0])
        assert_same(peek_and_check(loader), next(iter(loader)))


@pytest.mark.parametrize("last_batch", ["pad", "partial"])
@pytest.mark.parametrize("rank", range(4))
def test_a_peek_of_a_rank_without_samples_has_all_fields(tars: str, last_batch: str, rank: int) -> None:
    with load(tars, rank=rank, world_size=4, batch_size=33, last_batch=last_batch) as loader:
        assert_same(peek_and_check(loader), next(iter(loader)))
    with load(tars, rank=rank, world_size=4, batch_size=4, last_batch=last_batch) as loader:
        loader.set_shares([1.0, 1.0, 1.0, 1e-6])
        assert_same(peek_and_check(loader), next(iter(loader)))


def test_a_peek_collates_and_its_errors_leave_no_thread(tars: str, tmp_path: Path) -> None:
    with load(tars, collate=lambda samples: [sample["__key__"] for sample in samples]) as loader:
        assert loader.peek() == next(iter(loader))
    with load(tars, decode={"txt": lambda data: int(b"x")}) as loader, pytest.raises(DecodeError, match="field 'txt'"):
        loader.peek()
    write_tars(tmp_path, [20, 20])
    with load(str(tmp_path), max_bad_chunks=1) as loader, load(str(tmp_path)) as strict:
        damaged = bytearray((tmp_path / "shard-00000.tar").read_bytes())
        damaged[:512] = b"x" * 512
        status = (tmp_path / "shard-00000.tar").stat()
        with (tmp_path / "shard-00000.tar").open("r+b") as shard:
            shard.write(damaged)
        os.utime(tmp_path / "shard-00000.tar", ns=(status.st_atime_ns, status.st_mtime_ns))
        with pytest.warns(BadChunkWarning):
            looked = loader.peek()
        assert loader.bad_chunks == []
        with pytest.warns(BadChunkWarning):
            assert_same(looked, next(iter(loader)))
        with pytest.raises(FormatError):
            strict.peek()
    assert not [thread for thread in started_threads() if thread.name == "penstock-look"]


def test_a_peek_heeds_what_a_pass_heeds(tars: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tars) as loader:
        pass
    with pytest.raises(LoaderClosedError):
        loader.peek()
    with DistributedDataLoader(tars, batch_size=10) as loader:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
        with pytest.raises(ConfigError, match="rank"):
            loader.peek()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; torch sees none here")
def test_a_peek_is_on_the_device_as_batches_are(tars: str) -> None:
    with load(tars, device="cuda", transform=None) as loader:
        looked = loader.peek()
        batch = next(iter(loader))
        assert looked["__id__"].device.type == "cuda"
        assert torch.equal(looked["__id__"], batch["__id__"])
        assert looked["txt"] == batch["txt"]
