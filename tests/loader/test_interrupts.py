"""Ctrl-C at any point of a loop that then goes on: no batch is lost or repeated, and no thread outlives the loader."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from interrupt import Interrupt
from row_functions import rest_a_moment
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, audit
from penstock.loader import DatasetError, Manifest, open_manifest
from penstock.loader.decoding.workers import pool as worker_pool
from penstock.loader.decoding.workers.process import Worker, start_process
from penstock.loader.pipeline.delivery_log import DeliveryLog
from penstock.loader.pipeline.pipeline import Pipeline
from penstock.loader.reading.chunk_reader import ChunkReader
from penstock.loader.run.batch_iterator import BatchIterator
from penstock.loader.run.resources import Resources
from penstock.loader.run.run import Run
from penstock.loader.sampler.sampler import Sampler

SAMPLES = 30
PARTS: dict[str, list[Callable[..., Any]]] = {
    "a pass": [
        BatchIterator.__next__,
        BatchIterator._take,
        BatchIterator._end,
        Sampler.advance,
        DeliveryLog.record,
    ],
    "the beginning of a pass": [
        DistributedDataLoader.__iter__,
        Run.begin,
        BatchIterator.__init__,
        Sampler.begin_pass,
    ],
    "the construction of a pipeline": [
        Run.pipeline,
        Run._start_pipeline,
        Pipeline.__init__,
        Pipeline.start,
        ChunkReader.__init__,
        ChunkReader.start,
    ],
    "the end of a pipeline": [Resources.stop_pipeline, Pipeline.close, Pipeline.stop],
}


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Opened once: hundreds of loaders are made of it."""
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [11, 12, 7])
    return open_manifest(str(folder), progress=False)


def loader_threads() -> list[str]:
    return [thread.name for thread in started_threads() if thread.name.startswith("penstock-")]


def keep_on(step: Callable[[], Any]) -> Any:
    """What the step returns when it is tried again after a Ctrl-C."""
    try:
        return step()
    except KeyboardInterrupt:
        return step()


def loop(loader: DistributedDataLoader[dict[str, Any]]) -> Iterator[list[int]]:
    """Two passes, the first left after a batch, by a training loop that survives a Ctrl-C."""
    first = keep_on(lambda: iter(loader))
    yield keep_on(lambda: next(first))["__id__"].tolist()
    second = keep_on(lambda: iter(loader))
    while (batch := keep_on(lambda: next(second, None))) is not None:
        yield batch["__id__"].tolist()


@pytest.mark.slow
@pytest.mark.parametrize("part", PARTS)
def test_an_interrupt_at_any_line_loses_and_repeats_no_batch(part: str, tars: Manifest, tmp_path: Path) -> None:
    def run(number: int) -> tuple[list[list[int]], bool]:
        folder = tmp_path / str(number)
        options: dict[str, Any] = {"batch_size": 16, "with_ids": True, "threads": 1, "last_batch": "partial"}
        with DistributedDataLoader(tars, rank=0, world_size=1, audit_dir=folder, **options) as loader:
            interrupt = Interrupt(PARTS[part], number)
            with interrupt:
                batches = list(loop(loader))
        assert audit(folder).is_exact
        return batches, interrupt.was_raised

    expected, _ = run(10**9)
    assert expected[0] == expected[1]
    assert sorted(sample for batch in expected[1:] for sample in batch) == list(range(SAMPLES))
    number, was_raised = 0, True
    while was_raised:
        batches, was_raised = run(number)
        assert batches == expected, f"line {number}"
        assert loader_threads() == [], f"line {number}"
        number += 1
    assert number > 5


@pytest.mark.slow
@pytest.mark.parametrize("name", ["penstock-fetch-0", "penstock-assemble"])
def test_an_interrupt_while_a_thread_begins_is_the_error_that_is_raised(
    name: str, tars: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = threading.Thread.start

    def interrupted(self: threading.Thread) -> None:
        if self.name != name:
            return start(self)
        monkeypatch.undo()
        self._ident = 1  # type: ignore[attr-defined]  # known by now, while the thread has not said that it runs
        raise KeyboardInterrupt

    with DistributedDataLoader(tars, batch_size=5, rank=0, world_size=1) as loader:
        batches = iter(loader)
        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert len(list(batches)) == SAMPLES // 5
    assert loader_threads() == []


def test_a_batch_whose_delivery_cannot_be_logged_is_not_lost(
    tars: Manifest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, calls = DeliveryLog.record, iter(range(1000))

    def fail_now_and_then(self: DeliveryLog, *args: Any) -> None:
        if next(calls) % 3 == 1:
            raise DatasetError("disk full")
        record(self, *args)

    monkeypatch.setattr(DeliveryLog, "record", fail_now_and_then)
    seen: list[int] = []
    with DistributedDataLoader(tars, batch_size=5, with_ids=True, rank=0, world_size=1, audit_dir=tmp_path) as loader:
        batches = iter(loader)
        while len(seen) < SAMPLES:
            try:
                seen += next(batches)["__id__"].tolist()
            except DatasetError:
                continue
    assert sorted(seen) == list(range(SAMPLES))
    assert audit(tmp_path).is_exact


def test_a_close_that_was_interrupted_ends_with_the_loaders_last_reference(
    tars: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(self: Pipeline) -> None:
        raise KeyboardInterrupt

    loader = DistributedDataLoader(tars, batch_size=5, rank=0, world_size=1)
    next(iter(loader))
    monkeypatch.setattr(Pipeline, "stop", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loader.close()
    monkeypatch.undo()
    assert loader_threads() != []
    del loader
    gc.collect()
    assert loader_threads() == []


@pytest.mark.slow
def test_an_interrupt_while_processes_start_is_forgotten_with_them(
    tars: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Worker] = []

    def interrupted() -> Worker:
        if begun:  # of which the first, not yet up, is told to end
            monkeypatch.undo()
            raise KeyboardInterrupt
        begun.append(start_process())
        return begun[0]

    with DistributedDataLoader(
        tars, batch_size=5, rank=0, world_size=1, processes=2, transform=rest_a_moment
    ) as loader:
        batches = iter(loader)
        monkeypatch.setattr(worker_pool, "start_process", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(batches)
        assert begun[0].process.poll() is not None
        assert len(list(batches)) == SAMPLES // 5
    assert loader_threads() == []


def test_ctrl_c_as_signals_are_held_back_for_a_new_process_does_not_hold_them_back_for_good(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held_back, mask = {signal.SIGINT, signal.SIGTERM}, signal.pthread_sigmask

    def interrupted(how: int, signals: Iterable[int]) -> set[Any]:
        before = mask(how, signals)
        if set(signals) == held_back:
            raise KeyboardInterrupt  # as the function does if the signal came before it was blocked
        return before

    monkeypatch.setattr(signal, "pthread_sigmask", interrupted)
    with pytest.raises(KeyboardInterrupt):
        start_process()
    assert not mask(signal.SIG_BLOCK, ()) & held_back
