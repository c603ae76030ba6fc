"""A loader that fails on one rank stops all of them in seconds, each with the first cause, and without a trainer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader import LoaderClosedError, RankStoppedError

SCRIPT = Path(__file__).with_name("stopping_rank.py")
SOON_S = 20.0  # on a busy machine; without being told, rank 0 trains for 30 s and rank 2 waits for ten minutes
WAIT_S = 30.0


@pytest.mark.slow
def test_an_error_on_one_rank_reaches_those_that_train_wait_or_are_blocked(tmp_path: Path) -> None:
    samples = write_tars(tmp_path / "data", [100, 100, 100])
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", str(SCRIPT)]
    run = subprocess.run(
        [*command, str(tmp_path / "data"), str(tmp_path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    told = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(3)]
    cause = told[1]["apart"]["message"]
    assert "no such class" in cause
    for rank in (0, 2):
        apart = told[rank]["apart"]
        assert apart["error"] == "RankStoppedError"
        assert apart["message"].startswith("rank 1 stopped: ")
        assert cause in apart["message"]
        assert "shard-0" in apart["message"]
        assert apart["seconds"] < SOON_S
    assert [one["threads"] for one in told] == [[], [], []]
    assert [one["again"] for one in told] == [{"batches": samples // 3}] * 3
    # Blocked in a collective, a rank cannot be stopped by us: its log has named the cause before it ends.
    assert run.stderr.count("rank 1 stopped: ") >= 4
    assert run.returncode != 0


@pytest.fixture
def group() -> Iterator[Any]:
    """This process as rank 0 of a group of two, whose other rank the test plays through the store that it gets."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    try:
        yield dist.distributed_c10d._get_default_store()
    finally:
        dist.destroy_process_group()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_tars(tmp_path / "data", [50, 50])
    return tmp_path / "data"


def watching() -> list[threading.Thread]:
    return [thread for thread in started_threads() if thread.name == "penstock-peers"]


def open_loader(source: Path, **options: Any) -> DistributedDataLoader[Any]:
    return DistributedDataLoader(source, batch_size=1, cache_dir=source.parent / "cache", **options)


def tell(store: Any, incident: int, message: str) -> None:
    """What rank 1 tells."""
    cause = {"rank": 1, "kind": "ChecksumError", "message": message, "shard": "a.tar", "offset": 7}
    store.set(f"penstock/stop/{incident}/cause", json.dumps(cause))


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no such class")


@pytest.mark.slow
def test_an_error_that_another_rank_told_is_raised_once_and_names_rank_shard_and_reason(group, data):
    cause = r"rank 1 stopped: ChecksumError: a\.tar at byte 7: wrong bytes"
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        tell(group, 1, "wrong bytes")
        wait_until(lambda: bool(loader._resources.peers.pending))
        with pytest.raises(RankStoppedError, match=cause) as caught:
            next(iterator)
        assert caught.value.rank == 1
        consumed = loader.state_dict()["consumed"]
        assert next(iterator)["txt"]
        assert loader.state_dict()["consumed"] == consumed + 2
        tell(group, 2, "again")
        wait_until(lambda: bool(loader._resources.peers.pending))
        with pytest.raises(RankStoppedError, match="again"):
            next(iterator)
    assert watching() == []


def test_an_error_of_another_rank_is_raised_by_one_of_a_process_loaders(group, data):
    with open_loader(data) as loader, open_loader(data) as other:
        iterators = [iter(loader), iter(other)]
        for iterator in iterators:
            next(iterator)
        tell(group, 1, "wrong bytes")
        wait_until(lambda: other._resources.pipeline._out._interruption is not None)
        with pytest.raises(RankStoppedError):
            next(iterators[0])
        assert next(iterators[1])["txt"]


def test_an_own_error_is_told_with_its_sample_and_shard(group, data):
    with open_loader(data, transform=fail) as loader:
        with pytest.raises(ValueError, match="no such class"):
            next(iter(loader))
        told = json.loads(group.get("penstock/stop/1/cause"))
        assert (told["rank"], told["kind"]) == (0, "ValueError")
        assert "no such class; in transform= of sample" in told["message"]
        assert "shard-0" in told["message"]
    assert watching() == []


def test_an_error_after_another_ranks_names_that_as_the_first_cause(group, data):
    group.add("penstock/stop/1/claims", 1)
    tell(group, 1, "wrong bytes")
    with open_loader(data, transform=fail) as loader:
        with pytest.raises((ValueError, RankStoppedError)) as caught:
            next(iter(loader))
        assert "rank 1 stopped: ChecksumError" in " ".join([str(caught.value), *getattr(caught.value, "__notes__", [])])


def test_closing_a_loader_is_no_error_of_its_rank(group, data):
    loader = open_loader(data)
    iterator = iter(loader)
    next(iterator)
    loader.close()
    with pytest.raises(LoaderClosedError):
        next(iterator)
    assert not group.check(["penstock/stop/1/cause"])


def test_a_rank_with_data_of_its_own_hears_of_nobody(group, data):
    tell(group, 1, "wrong bytes")
    with open_loader(data, rank=0, world_size=1) as loader:
        assert sum(1 for _ in loader) == 100
        assert watching() == []


def test_a_group_that_is_destroyed_ends_the_watch_and_not_the_pass(data):
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - registers the backend "fake"

    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=2)
    with open_loader(data) as loader:
        iterator = iter(loader)
        next(iterator)
        assert len(watching()) == 1
        dist.destroy_process_group()
        wait_until(lambda: watching() == [])
        assert sum(1 for _ in iterator) == 49
