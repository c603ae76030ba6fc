"""Processes that take images over from a rank's threads: the same batches, and nothing where threads do as well."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import row_functions
from device_pictures import picture, write
from equal_batches import assert_equal
from started_process import worker_processes
from started_threads import started_threads

from penstock import DistributedDataLoader, ImageDecoder, Mixture, Source
from penstock.loader.config import tuning
from penstock.loader.config.tuning import count_image_processes
from penstock.loader.decoding.row_job import RowJob
from penstock.loader.decoding.workers import images
from penstock.loader.decoding.workers import pool as worker_pool
from penstock.loader.decoding.workers import process as worker_process
from penstock.loader.errors import WorkerError

RANDOM = {"jpg": ImageDecoder(size=(56, 72), crop="random", flip=0.5)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("pictures"), [picture(number) for number in range(48)])


@pytest.fixture(autouse=True)
def many_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores, where few images suffice; of the processes two, which this one has cores for."""
    monkeypatch.setattr(tuning, "usable_cores", lambda: 8)
    monkeypatch.setattr(images, "_BEGIN_AFTER", 50)
    monkeypatch.setattr(tuning, "_MOST", 2)


def load(source: Any, **options: Any) -> DistributedDataLoader:
    # Little is read ahead, so that what processes decode is soon what is handed out.
    given = {"batch_size": 8, "decode": RANDOM, "seed": 4, "with_ids": True, "read_ahead": "128KiB", **options}
    return DistributedDataLoader(source, **given)


def epochs(loader: DistributedDataLoader, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield from loader


def wait_until(loader: DistributedDataLoader, running: int, passes: int = 500) -> None:
    """Read until so many processes decode."""
    for _ in epochs(loader, passes):
        time.sleep(0.01)
        if len(worker_processes()) == running and loader.metrics().decode_processes == running:
            return
    raise AssertionError(f"{worker_processes()} run, and {loader.metrics().decode_processes} decode")


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        *(pytest.param({"decode": one}, marks=pytest.mark.slow) for one in ("auto", {"jpg": ImageDecoder()})),
    ],
)
def test_batches_are_those_of_threads_before_and_after_and_in_between(folder: str, options: dict[str, Any]) -> None:
    with load(folder, **options) as loader, load(folder, **options, processes=0) as threads:
        others = epochs(threads, 1000)
        for batch in epochs(loader, 3):
            assert_equal(batch, next(others))
        while loader.metrics().decode_processes != 2:
            for batch in loader:
                assert_equal(batch, next(others))
        for batch in epochs(loader, 30):
            assert_equal(batch, next(others))
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


@pytest.mark.slow
def test_a_mixture_and_a_resume_are_those_of_threads_too(folder: str) -> None:
    mixture = Mixture({folder: 1.0}, stop="never")
    with load(mixture) as loader:
        wait_until(loader, 2)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [next(batches) for _ in range(40)]
    with load(mixture, processes=0) as threads:
        threads.load_state_dict(state)
        for one, other in zip(expected, threads, strict=False):
            assert_equal(one, other)


def darker(sample: dict[str, Any]) -> dict[str, Any]:
    return {**sample, "jpg": sample["jpg"] // 2}


CENTRE = {"jpg": ImageDecoder(size=(56, 72), crop="center")}


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"keep": lambda sample: True}], ids=["plain", "stream"])
@pytest.mark.parametrize("own", [{"transform": darker}, {"decode": CENTRE}], ids=["transform", "decode"])
def test_sources_that_are_worked_on_in_other_ways_stay_with_the_threads(
    folder: str, tmp_path: Path, own: dict[str, Any], options: dict[str, Any]
) -> None:
    other = write(tmp_path / "other", [picture(number) for number in range(48)])
    mixture = Mixture({"a": Source(folder), "b": Source(other, **own)}, stop="all_exhausted")
    with load(mixture, **options) as loader, load(mixture, **options, processes=0) as threads:
        for one, two in zip(epochs(loader, 12), epochs(threads, 12), strict=True):
            assert_equal(one, two)
            time.sleep(0.005)
        assert loader.metrics().decode_processes == 0


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "options",
    [
        {"threads": 2},
        {"processes": 0},
        {"autotune": False},
        {"raw": "view"},
        {"transform": row_functions.keep},
        {"decode": {"jpg": row_functions.reverse_bytes}},
        {"decode": None},
    ],
)
def test_who_says_what_decodes_or_brings_code_gets_no_processes(folder: str, options: dict[str, Any]) -> None:
    with load(folder, **options) as loader:
        for _ in epochs(loader, 4):
            pass
        time.sleep(0.2)
        assert worker_processes() == []
        assert not [thread for thread in started_threads() if "worker" in thread.name]


@pytest.mark.slow
def test_who_reads_little_starts_none(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_BEGIN_AFTER", 10_000)
    with load(folder) as loader:
        for _ in epochs(loader, 4):
            pass
        assert worker_processes() == []


@pytest.mark.slow
def test_where_processes_cannot_start_threads_go_on_and_a_warning_says_so(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise WorkerError("a worker process cannot be started: no room")

    monkeypatch.setattr(worker_pool, "start_process", refuse)
    with caplog.at_level(logging.WARNING), load(folder) as loader, load(folder, processes=0) as threads:
        for one, other in zip(epochs(loader, 6), epochs(threads, 6), strict=True):
            assert_equal(one, other)
            time.sleep(0.01)
        assert "threads decode the images, because worker processes cannot: a worker process cannot be" in caplog.text
        assert worker_processes() == []


@pytest.mark.full
def test_one_that_dies_while_they_start_leaves_the_work_to_threads(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = worker_pool.start_process

    def start_and_kill() -> Any:
        worker = start()
        worker.process.kill()
        return worker

    monkeypatch.setattr(worker_pool, "start_process", start_and_kill)
    with caplog.at_level(logging.WARNING), load(folder) as loader:
        for _ in epochs(loader, 200):
            time.sleep(0.01)
            if "images go on" in caplog.text:
                break
        assert "SIGKILL" in caplog.text
        assert len(list(loader)) == 6
        assert worker_processes() == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_where_one_is_killed_threads_do_its_work_and_nothing_is_lost(
    folder: str, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    with load(folder) as loader, load(folder, processes=0) as threads:
        others = epochs(threads, 1000)
        killed: list[int] = []
        for _ in range(300):
            if not killed and loader.metrics().decode_processes == 2:
                killed = worker_processes()
            for batch in loader:
                assert_equal(batch, next(others))
                if killed:
                    with suppress(ProcessLookupError):  # of an earlier batch
                        os.kill(killed[0], number)
            if killed and "threads decode the images" in caplog.text:
                break
            time.sleep(0.01)
            if killed and number == signal.SIGTERM:
                break
        assert killed
        assert ("SIGKILL" in caplog.text) == (number == signal.SIGKILL)  # SIGTERM is the rank's own to heed
        for batch in epochs(loader, 3):
            assert_equal(batch, next(others))
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


@pytest.mark.slow
def test_an_error_in_the_place_of_results_is_the_threads_to_tell(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    place, calls = RowJob._place, []

    def fail_once(self: RowJob, *given: Any) -> None:
        calls.append(given)
        if len(calls) == 3:
            raise MemoryError("no room")
        place(self, *given)

    monkeypatch.setattr(RowJob, "_place", fail_once)
    with load(folder) as loader, load(folder, processes=0) as threads:
        for one, other in zip(epochs(loader, 100), epochs(threads, 100), strict=True):
            assert_equal(one, other)
            time.sleep(0.001)
        assert len(calls) >= 3
        assert "worker processes cannot: no room" in caplog.text
        assert loader.metrics().decode_processes == 0


@pytest.mark.slow
def test_a_fork_while_they_start_does_not_hide_that_one_ended(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A child that is forked between a connection's making and its closing holds a copy of the worker's end."""
    popen, forked = subprocess.Popen, []

    def start_and_fork(*given: Any, **named: Any) -> Any:
        started = popen(*given, **named)
        if not forked:
            forked.append(os.fork())
            if not forked[0]:
                time.sleep(600)
                os._exit(0)
        return started

    monkeypatch.setattr(worker_process.subprocess, "Popen", start_and_fork)
    try:
        with load(folder) as loader, load(folder, processes=0) as threads:
            others = epochs(threads, 1000)
            for _ in range(300):
                workers = worker_processes() if loader.metrics().decode_processes == 2 else []
                for batch in loader:
                    assert_equal(batch, next(others))
                if workers:
                    os.kill(min(workers), signal.SIGKILL)
                    break
                time.sleep(0.01)
            assert workers
            for batch in epochs(loader, 60):
                assert_equal(batch, next(others))
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


@pytest.mark.slow
def test_closing_while_they_start_leaves_none(folder: str) -> None:
    loader = load(folder)
    for _ in epochs(loader, 2):
        pass
    loader.close()
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")
def test_bad_images_are_skipped_as_by_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = [picture(number) if number % 9 else b"\xff\xd8\xff nothing" for number in range(48)]
    url = write(tmp_path / "some", pictures)
    placed: list[Any] = []
    place = RowJob._place
    monkeypatch.setattr(RowJob, "_place", lambda self, *given: placed.append(place(self, *given)))
    skips = {"on_error": "skip", "max_errors": 0.5}
    with load(url, **skips) as loader, load(url, **skips, processes=0) as threads:
        others = epochs(threads, 1000)
        for _ in range(500):
            for batch in loader:
                assert_equal(batch, next(others))
            if len(placed) > 200:  # long after what was ahead when processes took over
                break
            time.sleep(0.01)
        assert len(placed) > 200


def test_how_many_depends_on_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "_MOST", 32)
    monkeypatch.setattr(tuning, "usable_memory", lambda: 128 << 30)
    assert [count_image_processes(cores) for cores in (1, 5, 6, 16, 100)] == [0, 0, 5, 13, 32]
    monkeypatch.setattr(tuning, "usable_memory", lambda: 8 << 30)
    assert count_image_processes(32) == 10
    monkeypatch.setattr(tuning, "usable_memory", lambda: 4 << 30)
    assert [count_image_processes(cores) for cores in (6, 32)] == [5, 0]
    monkeypatch.setattr(tuning, "usable_memory", lambda: 100 << 20)
    assert count_image_processes(32) == 0
