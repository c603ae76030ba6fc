"""How memory and threads are divided, and who is told that memory is short."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from made_manifest import make_manifest
from tar_dataset import write_tars

from penstock import DistributedDataLoader
from penstock.loader.order.plan import Order
from penstock.loader.pipeline.tuning import (
    MemoryLimitWarning,
    PipelineOptions,
    TuningChoice,
    first_fetch_threads,
    tune,
)

MANIFEST = make_manifest([[1000] * 40])  # chunks of 7,000 bytes of memory


def options(memory_limit: int | None, *, world_size: int = 1, is_local: bool = True, lanes: int = 4) -> PipelineOptions:
    return tune(
        MANIFEST,
        Order(lanes=lanes, window=2),
        world_size=world_size,
        memory_limit=memory_limit,
        threads=3,
        is_local=is_local,
        device=torch.device("cpu"),
    )


def test_chunks_batches_and_spans_share_the_memory_limit() -> None:
    tuned = options(8 << 20)
    assert (tuned.chunk_budget_bytes, tuned.batch_budget_bytes, tuned.span_bytes) == (6 << 20, 1 << 20, 1 << 20)
    assert (tuned.decode_threads, tuned.device) == (3, torch.device("cpu"))


def test_auto_follows_what_the_order_keeps_open() -> None:
    assert options(None, lanes=16).chunk_budget_bytes > options(None, lanes=4).chunk_budget_bytes


def test_of_a_small_data_set_some_epochs_are_read_ahead_at_first_and_of_a_large_one_what_fits() -> None:
    assert options(None).read_ahead_bytes == 32 << 20  # 40 chunks of 7,000 bytes
    assert options(8 << 20).read_ahead_bytes == 6 << 20
    large = make_manifest([[10_000_000] * 40])
    tuned = tune(
        large, Order(lanes=4, window=2), world_size=1, memory_limit=1 << 30, threads=1, is_local=True, device=None
    )
    assert tuned.read_ahead_bytes == tuned.chunk_budget_bytes


def test_remote_stores_are_asked_by_more_threads_than_local_ones() -> None:
    assert options(8 << 20, is_local=False).fetch_threads > options(8 << 20).fetch_threads


def test_a_limit_below_the_open_windows_warns_and_one_above_does_not() -> None:
    with pytest.warns(MemoryLimitWarning, match=r"5 lanes of this rank keep about 70,000 bytes.*memory_limit=80,000"):
        options(80_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        options(100_000)
        options(80_000, world_size=4)


def test_memory_is_ample_where_twice_the_open_windows_fit() -> None:
    kept = [(tuned.holds_windows, tuned.has_spare) for tuned in (options(100_000, lanes=4), options(200_000, lanes=4))]
    assert kept == [(True, False), (True, True)]


def test_the_warning_points_to_the_loop_over_the_loader(tmp_path: Path) -> None:
    write_tars(tmp_path, [200, 200])
    with (
        DistributedDataLoader(str(tmp_path), batch_size=4, memory_limit="10kB") as loader,
        pytest.warns(MemoryLimitWarning) as caught,
    ):
        next(iter(loader))
    assert [Path(warning.filename) for warning in caught] == [Path(__file__)]


def test_a_store_far_away_is_asked_for_what_is_on_its_way() -> None:
    fetches = [first_fetch_threads(False, response_s, 4 << 20) for response_s in (None, 0.001, 0.02, 0.1, 10.0)]
    assert fetches == [16, 17, 22, 46, 64]
    assert first_fetch_threads(False, 0.02, 1000) == 64
    assert first_fetch_threads(True, 0.1, 4 << 20) == 4


def test_a_loader_begins_with_as_many_requests_as_its_store_is_slow(memory_store, put_shards) -> None:
    put_shards(memory_store, 3)
    memory_store.slow_down(latency_s=0.05)
    with DistributedDataLoader(memory_store.url, batch_size=4) as loader:
        next(iter(loader))
        assert loader.metrics().fetch_threads == 64


def test_decoding_begins_with_what_threads_do_without_waiting_for_each_other() -> None:
    def first(cores: int, **options: Any) -> int:
        return TuningChoice(cores=cores, cores_of_node=cores, **options).first_decode_threads

    assert [first(cores) for cores in (1, 2, 8, 64)] == [1, 2, 8, 8]
    assert first(64, decode_threads=20) == first(64, decode_threads=20, autotune=False) == 20
    assert first(64, autotune=False) == 64
