"""What the loader does about errors, damaged shards and wrong arguments, and that it leaves no thread behind."""

from __future__ import annotations

import gc
import itertools
import os
import threading
import time
from typing import Any

import pytest
from loaders_of_ranks import SIZES, ids_of, ranks
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, ImageDecoder
from penstock.loader import (
    BadChunkWarning,
    ConfigError,
    DatasetError,
    DecodeError,
    FormatError,
    LoaderClosedError,
    PartitionError,
    open_manifest,
)
from penstock.storage import NotFoundError


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def penstock_threads() -> list[str]:
    return [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


def test_an_error_in_a_transform_names_the_sample_and_ends_the_pass(tars):
    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("no such thing")

    with DistributedDataLoader(tars, batch_size=16, transform=transform) as loader:
        with pytest.raises(RuntimeError, match="no such thing") as caught:
            next(iter(loader))
        assert "shard-0" in "".join(caught.value.__notes__)


@pytest.mark.parametrize("where", ["transform", "collate", "dropping"])
def test_a_users_stop_iteration_is_an_error_and_not_the_epochs_end(tars, where):
    def stop(value: Any) -> Any:
        return value if next(calls) < 20 else next(iter(()))

    calls = itertools.count()
    options: dict[str, Any] = {"transform": stop, "may_drop": True} if where == "dropping" else {where: stop}
    with DistributedDataLoader(tars, batch_size=8, **options) as loader:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="StopIteration"):
                list(loader)
        if where != "collate":
            with pytest.raises(RuntimeError, match="StopIteration"):
                list(loader.dataset)


@pytest.mark.parametrize("how", ["iterator kept", "state loaded"])
def test_after_an_error_training_goes_on_from_the_same_position(tars, how):
    broken = {"is": True}

    def transform(sample: dict[str, Any]) -> dict[str, Any]:
        if broken["is"] and int(sample["txt"]) % 100 == 50:
            raise RuntimeError("broken")
        return sample

    with DistributedDataLoader(tars, batch_size=8, transform=transform, with_ids=True, last_batch="partial") as loader:
        seen = []
        batches = iter(loader)
        with pytest.raises(RuntimeError, match="broken"):
            seen.extend(sample for batch in batches for sample in ids_of(batch))
        assert not any(name.startswith("penstock") for name in penstock_threads())
        broken["is"] = False
        if how == "state loaded":
            loader.load_state_dict(loader.state_dict())
            batches = iter(loader)
        seen += [sample for batch in batches for sample in ids_of(batch)]
        assert sorted(seen) == list(range(sum(SIZES)))


def test_a_damaged_image_is_named_with_its_shard_and_key(tmp_path):
    write_tars(tmp_path, [20])
    decode = {"bin": ImageDecoder(size=8)}
    named = r"number \d+ of shard-00000.tar, key '\d{8}'\).*'bin'"
    loader = DistributedDataLoader(str(tmp_path), batch_size=4, decode=decode)
    with loader, pytest.raises(DecodeError, match=named):
        next(iter(loader))


def test_close_in_mid_epoch_leaves_no_thread(tars):
    loader = DistributedDataLoader(tars, batch_size=4)
    batches = iter(loader)
    next(batches)
    assert penstock_threads()
    loader.close()
    assert penstock_threads() == []
    with pytest.raises(LoaderClosedError):
        next(batches)
    loader.close()


def test_a_forgotten_loader_takes_its_threads_along(tars):
    loader = DistributedDataLoader(tars, batch_size=4)
    next(iter(loader))
    del loader
    gc.collect()
    assert penstock_threads() == []


@pytest.mark.slow
def test_closing_from_another_thread_wakes_the_waiting_one(tars):
    def slow(sample: dict[str, Any]) -> dict[str, Any]:
        time.sleep(1)
        return sample

    loader = DistributedDataLoader(tars, batch_size=64, transform=slow, threads=1)
    threading.Timer(0.5, loader.close).start()
    started = time.monotonic()
    with pytest.raises(LoaderClosedError):
        for _ in loader:
            pass
    assert time.monotonic() - started < 30  # an epoch takes five minutes
    loader.close()
    assert penstock_threads() == []


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, ConfigError, "give one of them"),
        ({"batch_size": 4, "global_batch_size": 4}, ConfigError, "give one of them"),
        ({"batch_size": 0}, ConfigError, "batch_size=0"),
        ({"batch_size": -3}, ConfigError, "batch_size=-3"),
        ({"batch_size": 2.5}, ConfigError, "batch_size=2.5"),
        ({"batch_size": 1000}, PartitionError, "above the data set's 312"),
        ({"batch_size": 1, "rank": 0, "world_size": 500}, PartitionError, "world_size=500"),
        ({"global_batch_size": 64, "rank": 0, "world_size": 6}, PartitionError, "use 66, or give batch_size= per rank"),
        ({"batch_size": 4, "rank": 3, "world_size": 3}, ConfigError, "from 0 to world_size - 1"),
        ({"batch_size": 4, "rank": 3}, ConfigError, "give both"),
        ({"batch_size": 4, "lanes": 12}, ConfigError, "power of two"),
        ({"batch_size": 4, "window": 0}, ConfigError, "window=0"),
        ({"batch_size": 4, "threads": 0}, ConfigError, "threads=0"),
        ({"batch_size": 4, "memory_limit": "lots"}, ConfigError, "memory_limit='lots'"),
        ({"batch_size": 4, "memory_limit": -1}, ConfigError, "memory_limit=-1"),
        ({"batch_size": 4, "last_batch": "skip"}, ConfigError, "'drop', 'pad' or 'partial'"),
        ({"batch_size": 4, "decode": "jpg"}, ConfigError, "decode="),
        ({"batch_size": 4, "transform": 3}, ConfigError, "transform=3"),
        ({"batch_size": 4, "cache_limit": "1GB"}, ConfigError, "cache_dir"),
        ({"batch_size": 4, "seed": -1}, ConfigError, "seed=-1"),
    ],
)
def test_bad_arguments_are_refused_at_once(tars, options, kind, message):
    with pytest.raises(kind, match=message):
        DistributedDataLoader(tars, **options)
    assert penstock_threads() == []


def test_a_shard_cut_short_after_indexing_is_named_with_its_offset(tmp_path):
    write_tars(tmp_path, [30, 30])
    loader = DistributedDataLoader(str(tmp_path), batch_size=4)
    path = tmp_path / "shard-00001.tar"
    path.write_bytes(path.read_bytes()[:9000])
    with pytest.raises(Exception, match=r"shard-00001\.tar") as caught:
        list(loader)
    assert type(caught.value).__module__.startswith("penstock.")
    loader.close()
    assert penstock_threads() == []


def test_a_rank_whose_share_rounds_to_nothing_names_the_shard_that_it_needs_for_the_fields(tmp_path):
    write_tars(tmp_path, [100, 300])
    manifest = open_manifest(tmp_path)
    (tmp_path / "shard-00001.tar").unlink()
    with DistributedDataLoader(manifest, batch_size=4, shuffle=False, lanes=1, rank=1, world_size=2) as loader:
        loader.set_shares([1.0, 0.0001])
        with pytest.raises(NotFoundError, match=r"shard-00001\.tar"):
            list(loader)


def test_bytes_that_change_without_a_change_of_size_or_time_are_found_by_the_format(tmp_path):
    write_tars(tmp_path, [30])
    path = tmp_path / "shard-00000.tar"
    stat = path.stat()
    loader = DistributedDataLoader(str(tmp_path), batch_size=4)
    with path.open("r+b") as file:
        file.seek(4 * 512)  # the header of the third member
        file.write(b"x" * 512)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(FormatError, match=r"shard-00000\.tar at byte"):
        list(loader)
    loader.close()


@pytest.mark.slow
def test_bad_chunks_are_replaced_alike_on_any_number_of_ranks_up_to_the_limit(tmp_path):
    write_tars(tmp_path, [30] * 6)
    with DistributedDataLoader(str(tmp_path), batch_size=4) as loader:
        manifest = loader.manifest
    for number in (1, 4):
        path = tmp_path / f"shard-{number:05d}.tar"
        stat = path.stat()
        with path.open("r+b") as file:
            file.seek(4 * 512)
            file.write(b"x" * 512)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    def deliver(world_size: int, **options: Any) -> list[list[int]]:
        steps = []
        for loader in ranks(manifest, world_size, global_batch_size=12, with_ids=True, **options):
            with loader:
                steps.append([ids_of(batch) for batch in loader])
                assert {bad.shard for bad in loader.bad_chunks} <= {"shard-00001.tar", "shard-00004.tar"}
        return [sorted(itertools.chain(*parts)) for parts in zip(*steps, strict=True)]

    with pytest.warns(BadChunkWarning, match="shard-0000[14].tar"):
        alone, together = deliver(1, max_bad_chunks=2), deliver(3, max_bad_chunks=2)
    assert alone == together
    assert set(itertools.chain(*alone)) == {*range(30), *range(60, 120), *range(150, 180)}
    with pytest.warns(BadChunkWarning), pytest.raises(DatasetError, match="more than max_bad_chunks=1"):
        deliver(1, max_bad_chunks=1)
    with pytest.raises(FormatError):
        deliver(1)
