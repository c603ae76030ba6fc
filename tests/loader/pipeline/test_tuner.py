"""Tuning while a loader runs: it changes speed, and neither the order nor what the user gave."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace
from itertools import chain, islice, repeat
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader
from penstock.loader import ConfigError, ParquetFormat
from penstock.loader.pipeline import autotune
from penstock.loader.pipeline.autotune import Settings, Sums
from penstock.loader.pipeline.tuning import PipelineOptions, TuningChoice
from penstock.storage.memory_store import MemoryStore

WAIT_S = 60
WORST: dict[str, Any] = {"fetch_threads": 1, "threads": 1, "read_ahead": 1}


@pytest.fixture
def slow_store(memory_store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """400 chunks of 32 rows, 5 ms away, and a tuner that looks often."""
    for shard in range(4):
        file = io.BytesIO()
        values = np.arange(shard * 3200, (shard + 1) * 3200)
        pq.write_table(pa.table({"n": values}), file, row_group_size=32)
        memory_store.put(f"{shard}.parquet", file.getvalue())
    memory_store.slow_down(latency_s=0.005)
    monkeypatch.setattr(autotune, "TICK_S", 0.05)
    return memory_store


def make(store: MemoryStore, **options: Any) -> DistributedDataLoader:
    one_group_a_chunk = ParquetFormat(chunk_bytes=1)
    return DistributedDataLoader(
        store.url, batch_size=16, seed=5, lanes=4, window=2, piece=0, format=one_group_a_chunk, **options
    )


def tuning_threads() -> int:
    return sum(thread.name == "penstock-tune" for thread in threading.enumerate())


@pytest.mark.slow
def test_bad_settings_are_raised_while_it_runs_and_neither_order_nor_state_notices(slow_store: MemoryStore) -> None:
    seen: list[list[int]] = []
    until = time.monotonic() + WAIT_S
    with make(slow_store, **WORST, autotune=True) as loader:
        assert loader.metrics().tuning_changes == 0
        batches = chain.from_iterable(repeat(loader))
        while loader.metrics().fetch_threads < 2:
            assert time.monotonic() < until, loader.metrics()
            seen.append(next(batches)["n"].tolist())
        metrics, state, left_at = loader.metrics(), loader.state_dict(), len(seen)
        seen += (batch["n"].tolist() for batch in islice(batches, 20))
    assert metrics.tuning_changes >= 1
    assert metrics.read_ahead_bytes > 1
    assert metrics.tuning
    assert tuning_threads() == 0
    with make(slow_store, autotune=False) as loader:
        plain = chain.from_iterable(repeat(loader))
        assert seen == [batch["n"].tolist() for batch in islice(plain, len(seen))]
        assert (loader.metrics().tuning, loader.metrics().tuning_changes, tuning_threads()) == ("off", 0, 0)
    with make(slow_store, **WORST) as loader:
        loader.load_state_dict(state)
        resumed = chain.from_iterable(repeat(loader))
        assert seen[left_at:] == [batch["n"].tolist() for batch in islice(resumed, 20)]


@pytest.mark.slow
def test_what_is_given_is_kept_and_the_rest_is_tuned(slow_store: MemoryStore) -> None:
    until = time.monotonic() + WAIT_S
    with make(slow_store, fetch_threads=1) as loader:
        batches = chain.from_iterable(repeat(loader))
        next(batches)
        assert tuning_threads() == 1
        while "at rest" not in loader.metrics().tuning:
            assert time.monotonic() < until, loader.metrics()
            next(batches)
        assert loader.metrics().fetch_threads == 1
    with make(slow_store, **WORST) as loader:
        next(iter(loader))
        assert tuning_threads() == 0
        assert loader.metrics().tuning == "every setting is given"
        assert loader.metrics().read_ahead_bytes == 1


class FakePipeline:
    """Waits for chunks all the time; ends with the first change, or cannot start the threads for it."""

    def __init__(self, error: Exception | None = None) -> None:
        self.stopping, self.error = threading.Event(), error
        self.applied: list[Settings] = []
        self._looks = 0

    def sums(self) -> Sums:
        self._looks += 1
        spent = float(self._looks)
        seconds = dict.fromkeys(("at_s", "waited_s", "chunk_waited_s", "fetching_s"), spent)
        counts = dict.fromkeys(("fetched_bytes", "decoded_rows", "batches"), 100 * self._looks)
        return Sums(**seconds, **counts, process_s=0.0, decoding_s=0.0, evicted_chunks=0)

    def apply(self, settings: Settings) -> None:
        self.applied.append(settings)
        self.stopping.set()
        if self.error is not None:
            raise self.error


OPTIONS = PipelineOptions(
    fetch_threads=1,
    most_fetch_threads=16,
    decode_threads=1,
    read_ahead_bytes=1,
    memory_limit_bytes=4000,
    chunk_budget_bytes=3000,
    header_budget_bytes=1,
    batch_budget_bytes=500,
    span_bytes=1,
)


def test_what_was_learned_holds_for_the_next_pipeline_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "TICK_S", 0.0)
    one = autotune.Tuner(TuningChoice(cores=2, cores_of_node=2))
    first = FakePipeline()
    one.begin(OPTIONS, chunk_bytes=10)
    one.run(first, first.stopping)
    assert first.applied == [Settings(fetch_threads=2, decode_threads=1, read_ahead_bytes=40)]
    assert one.changes == 1
    again = one.begin(OPTIONS, chunk_bytes=10)
    assert (again.fetch_threads, again.read_ahead_bytes) == (2, 40)
    smaller = one.begin(replace(OPTIONS, chunk_budget_bytes=10, read_ahead_bytes=10), chunk_bytes=10)
    assert (smaller.fetch_threads, smaller.read_ahead_bytes) == (1, 10)


class FarPipeline(FakePipeline):
    """Fetches the faster, the more threads do so; ends once somebody has looked so often."""

    _bytes, _threads = 0, 1

    def sums(self) -> Sums:
        if self._looks == 100:
            self.stopping.set()
        self._bytes += 100 * self._threads
        return replace(super().sums(), fetched_bytes=self._bytes)

    def apply(self, settings: Settings) -> None:
        self.applied.append(settings)
        self._threads = settings.fetch_threads


@pytest.mark.parametrize(("chunk_bytes", "threads"), [(5000, 1), (2000, 2), (500, 6), (200, 15)])
def test_as_many_chunks_may_be_on_their_way_as_the_budget_holds(
    monkeypatch: pytest.MonkeyPatch, chunk_bytes: int, threads: int
) -> None:
    monkeypatch.setattr(autotune, "TICK_S", 0.0)
    one = autotune.Tuner(TuningChoice(cores=1, cores_of_node=2))
    far = FarPipeline()
    one.begin(OPTIONS, chunk_bytes)
    one.run(far, far.stopping)
    assert max(settings.fetch_threads for settings in far.applied) == threads
    assert all(settings.read_ahead_bytes <= OPTIONS.chunk_budget_bytes for settings in far.applied)


class SlowPipeline(FarPipeline):
    """Has no batch yet; a look is half a second after the last one, but for the one after a change."""

    _at_s, _pause_s = 0.0, 0.5

    def sums(self) -> Sums:
        self._at_s += self._pause_s
        self._pause_s = 0.5
        if self._at_s >= 30:
            self.stopping.set()
        spent = dict.fromkeys(("at_s", "waited_s", "chunk_waited_s"), self._at_s)
        return replace(super().sums(), **spent, fetching_s=self._threads * self._at_s, batches=0)

    def apply(self, settings: Settings) -> None:
        super().apply(settings)
        self._pause_s = 0.0


def test_one_fetch_thread_becomes_64_within_30_s_though_no_batch_has_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "TICK_S", 0.0)
    one = autotune.Tuner(TuningChoice(cores=1, cores_of_node=2))
    slow = SlowPipeline()
    one.begin(replace(OPTIONS, most_fetch_threads=64), chunk_bytes=20)
    one.run(slow, slow.stopping)
    assert [settings.fetch_threads for settings in slow.applied][:6] == [2, 4, 8, 16, 32, 64]


def test_a_machine_without_more_threads_ends_the_tuning_and_not_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "TICK_S", 0.0)
    one = autotune.Tuner(TuningChoice(cores=2, cores_of_node=2))
    pipeline = FakePipeline(RuntimeError("can't start new thread"))
    one.begin(OPTIONS, chunk_bytes=10)
    one.run(pipeline, pipeline.stopping)
    assert one.reason == "ended: can't start new thread"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"fetch_threads": 0}, "fetch_threads=0: must be a whole number of at least 1"),
        ({"threads": 1.5}, "threads=1.5: must be a whole number"),
        ({"read_ahead": "much"}, "read_ahead='much' is not a size"),
        ({"read_ahead": "2GiB", "memory_limit": "1GiB"}, "read_ahead='2GiB' is more than memory_limit=1,073,741,824"),
        ({"autotune": "yes"}, "autotune='yes': must be 'auto', True or False"),
    ],
)
def test_settings_that_cannot_be_are_refused(slow_store: MemoryStore, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        make(slow_store, **given)
