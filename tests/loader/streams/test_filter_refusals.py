"""Loaders that drop samples: what is refused, stops, or is told in words."""

from __future__ import annotations

import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from filtered_loaders import SIZES, TOTAL, make
from row_functions import drop_odd
from streams_ranks import ThreadRanks
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader import (
    ConfigError,
    DatasetError,
    Keep,
    LoaderClosedError,
    PartitionError,
    open_manifest,
)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def test_shares_that_leave_a_rank_without_samples_are_refused_on_all_ranks(tars: str) -> None:
    def run(loader: DistributedDataLoader[Any]) -> None:
        loader.set_shares([1.0, 100.0])
        next(iter(loader))

    results = ThreadRanks(2, tars, global_batch_size=4, transform=drop_odd, may_drop=True).run(run)
    assert [type(result) for result in results] == [PartitionError] * 2
    assert "nothing to rank 0" in str(results[1])


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_filter_that_drops_everything_is_an_error_on_every_rank(tars: str, world_size: int) -> None:
    results = ThreadRanks(world_size, tars, batch_size=8, keep=lambda sample: False).run(list)
    assert [type(result) for result in results] == [PartitionError] * world_size
    assert {str(result) for result in results} == {str(results[0])}
    assert "dropped all 312 samples of epoch 0" in str(results[0])


def test_too_few_survivors_for_one_batch_say_how_many_there_are(tars: str) -> None:
    one = make(tars, keep=lambda sample: sample["txt"] == b"7", last_batch="drop")
    with one as loader, pytest.raises(PartitionError, match="left 1 of the 312 samples"):
        next(iter(loader))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("by", ["transform", "keep"])
def test_what_raises_is_told_on_every_rank_after_the_same_batches(tars: str, world_size: int, by: str) -> None:
    def fail(sample: dict[str, Any]) -> dict[str, Any]:
        if int(sample["txt"]) == 7:
            raise LookupError("seven is not wanted")
        return sample

    got: dict[int, int] = {}

    def run(loader: DistributedDataLoader[Any]) -> None:
        got[loader.rank] = 0
        for _ in loader:
            got[loader.rank] += 1

    filters: dict[str, Any] = {"transform": fail, "may_drop": True} if by == "transform" else {"keep": fail}
    results = ThreadRanks(world_size, tars, batch_size=4, window=1, seed=5, **filters).run(run)
    assert len(set(got.values())) == 1
    own = [result for result in results if isinstance(result, LookupError)]
    others = [result for result in results if isinstance(result, DatasetError)]
    assert len(own) >= 1
    assert len(own) + len(others) == world_size
    assert f"in {by}= of sample 7 (number 7 of" in own[0].__notes__[0]
    for other in others:
        assert "LookupError: seven is not wanted" in str(other)
        assert f"in {by}= of sample 7" in str(other)


@pytest.mark.slow
def test_a_chunk_that_cannot_be_read_stops_all_ranks_after_the_same_batches(tmp_path: Path) -> None:
    write_tars(tmp_path, SIZES)
    manifest = open_manifest(str(tmp_path))
    broken = sorted(tmp_path.glob("*.tar"))[4]
    broken.write_bytes(b"\0" * broken.stat().st_size)
    got: dict[int, int] = {}

    def run(loader: DistributedDataLoader[Any]) -> None:
        got[loader.rank] = 0
        for _ in loader:
            got[loader.rank] += 1

    results = ThreadRanks(2, manifest, batch_size=4, transform=drop_odd, may_drop=True).run(run)
    assert all(isinstance(result, Exception) for result in results)
    assert all(broken.name in str(result) for result in results)
    assert got[0] == got[1]


@pytest.mark.slow
def test_a_rank_that_closes_its_loader_early_is_named_by_those_that_need_its_lanes(tars: str) -> None:
    has_left = threading.Event()

    def keep(sample: Any) -> bool:
        if int(sample["txt"]) % (TOTAL // 2) > 60:  # far into either lane
            has_left.wait(60)
        return True

    def read(loader: DistributedDataLoader[Any]) -> int:
        if loader.rank == 1:
            return len(list(loader))
        next(iter(loader))
        loader.close()
        has_left.set()
        return 1

    one, other = ThreadRanks(2, tars, batch_size=8, keep=keep, shuffle=False, lanes=2).run(read)
    assert one == 1
    assert isinstance(other, DatasetError)
    assert "the loader of rank 0 was closed" in str(other)
    assert "leave an epoch after the same batch on all ranks" in str(other)


def test_none_without_may_drop_says_what_to_give(tars: str) -> None:
    with make(tars, transform=drop_odd, may_drop=False) as loader, pytest.raises(ConfigError, match="may_drop=True"):
        list(loader)


def test_several_ranks_without_a_process_group_are_told_to_make_one(tars: str) -> None:
    with make(tars, rank=0, world_size=2) as loader, pytest.raises(ConfigError, match="init_process_group"):
        next(iter(loader))


def test_a_transform_that_decides_otherwise_when_asked_again_is_found_out(tars: str) -> None:
    unwanted: set[str] = set()

    def fickle(sample: dict[str, Any]) -> dict[str, Any] | None:
        return None if sample["txt"] in unwanted else sample

    with make(tars, transform=fickle, may_drop=True) as loader:
        list(loader)
        loader.set_epoch(0)
        unwanted.add("7")
        with pytest.raises(ConfigError, match="decides differently"):
            list(loader)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"may_drop": True, "transform": None}, "without a transform"),
        ({"may_drop": 1}, "True or False"),
        ({"keep": 3}, "keep=3"),
        ({"cost": "tokens"}, "cost= with may_drop=True"),
        ({"batch_tokens": 100, "batch_size": None}, "batch_tokens= with may_drop=True"),
        ({"keep": Keep(["nothing"], len)}, "nothing"),
    ],
)
def test_arguments_that_cannot_work_are_refused(tars: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(tars, **options)


def test_a_predicate_that_returns_something_else_is_told_what_to_return(tars: str) -> None:
    with (
        make(tars, keep=Keep(["txt"], lambda columns: [1])) as loader,
        pytest.raises(ConfigError, match="one a sample"),
    ):
        next(iter(loader))


def test_a_hanging_transform_is_named(tars: str) -> None:
    go_on, begun = threading.Event(), threading.Event()

    def hang(sample: dict[str, Any]) -> None:
        begun.set()
        go_on.wait(60)

    def wait(loader: DistributedDataLoader[Any]) -> None:
        with suppress(LoaderClosedError):
            next(iter(loader))

    with make(tars, transform=hang, may_drop=True) as loader:
        thread = threading.Thread(target=wait, args=(loader,), daemon=True)
        thread.start()
        assert begun.wait(60)
        while not (told := loader.activity()):
            pass
        assert "decoding and transforming samples" in told["waiting_for"]
        go_on.set()
        loader.close()
        thread.join(60)
