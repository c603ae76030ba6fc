"""Processes that take images over from a rank's threads: the same batches, and nothing where threads do as well."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import row_functions
import torch
from device_pictures import picture, write
from started_process import worker_processes
from started_threads import started_threads

from penstock import DistributedDataLoader, ImageDecoder, Mixture
from penstock.loader.arguments import tuning
from penstock.loader.decoding.workers import images
from penstock.loader.decoding.workers import pool as worker_pool
from penstock.loader.decoding.workers.images import count_image_processes
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
    monkeypatch.setattr(images, "_MOST", 2)


def load(source: Any, **options: Any) -> DistributedDataLoader:
    given = {"batch_size": 8, "decode": RANDOM, "seed": 4, "with_ids": True, **options}
    return DistributedDataLoader(source, **given)


def epochs(loader: DistributedDataLoader, count: int) -> Iterator[dict[str, Any]]:
    for _ in range(count):
        yield from loader


def wait_until(loader: DistributedDataLoader, running: int, passes: int = 500) -> None:
    """Read until so many processes decode."""
    for _ in epochs(loader, passes):
        time.sleep(0.01)
        if len(worker_processes()) == running and loader.metrics().decode_threads == running:
            return
    raise AssertionError(f"{worker_processes()} run, and {loader.metrics().decode_threads} decode")


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )


@pytest.mark.parametrize("options", [{}, {"decode": {"jpg": ImageDecoder()}}, {"decode": "auto"}, {"raw": "bytes"}])
def test_batches_are_those_of_threads_before_and_after_and_in_between(folder: str, options: dict[str, Any]) -> None:
    with load(folder, **options) as loader, load(folder, **options, processes=0) as threads:
        others = epochs(threads, 1000)
        for batch in epochs(loader, 3):
            assert same_values(batch, next(others))
        while loader.metrics().decode_threads != 2:
            for batch in loader:
                assert same_values(batch, next(others))
        for batch in epochs(loader, 3):
            assert same_values(batch, next(others))
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


def same_values(one: dict[str, Any], other: dict[str, Any]) -> bool:
    lists = [name for name, value in one.items() if isinstance(value, list)]
    for name in lists:
        pairs = zip(one.pop(name), other.pop(name), strict=True)
        if not all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs):
            return False
    return same(one, other)


def test_a_mixture_and_a_resume_are_those_of_threads_too(folder: str) -> None:
    mixture = Mixture({folder: 1.0}, stop="never")
    with load(mixture) as loader:
        wait_until(loader, 2)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        expected = [next(batches) for _ in range(4)]
    with load(mixture, processes=0) as threads:
        threads.load_state_dict(state)
        assert all(same(one, other) for one, other in zip(expected, threads, strict=False))


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


def test_who_reads_little_starts_none(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_BEGIN_AFTER", 10_000)
    with load(folder) as loader:
        for _ in epochs(loader, 4):
            pass
        assert worker_processes() == []


def test_where_processes_cannot_start_threads_go_on_and_a_warning_says_so(
    folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise WorkerError("a worker process cannot be started: no room")

    monkeypatch.setattr(worker_pool, "start_process", refuse)
    with caplog.at_level(logging.WARNING), load(folder) as loader, load(folder, processes=0) as threads:
        for one, other in zip(epochs(loader, 6), epochs(threads, 6), strict=True):
            assert same(one, other)
            time.sleep(0.01)
        assert "images go on being decoded by threads, not by processes: a worker process cannot be" in caplog.text
        assert worker_processes() == []


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


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_where_one_is_killed_threads_do_its_work_and_nothing_is_lost(
    folder: str, caplog: pytest.LogCaptureFixture, number: signal.Signals
) -> None:
    with load(folder) as loader, load(folder, processes=0) as threads:
        others = epochs(threads, 1000)
        for _ in range(300):
            killed = worker_processes() if loader.metrics().decode_threads == 2 else []
            for batch in loader:
                assert same(batch, next(others))
                if killed:
                    with suppress(ProcessLookupError):  # of an earlier batch
                        os.kill(killed[0], number)
            if killed and "images go on being decoded by threads" in caplog.text:
                break
            time.sleep(0.01)
            if killed and number == signal.SIGTERM:
                break
        assert killed
        assert ("SIGKILL" in caplog.text) == (number == signal.SIGKILL)  # SIGTERM is the rank's own to heed
        for batch in epochs(loader, 3):
            assert same(batch, next(others))
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


def test_closing_while_they_start_leaves_none(folder: str) -> None:
    loader = load(folder)
    for _ in epochs(loader, 2):
        pass
    loader.close()
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


@pytest.mark.filterwarnings("ignore::penstock.loader.BadSampleWarning")
def test_bad_images_are_skipped_as_by_threads(tmp_path: Path) -> None:
    pictures = [picture(number) if number % 9 else b"\xff\xd8\xff nothing" for number in range(48)]
    url = write(tmp_path / "some", pictures)
    skips = {"on_error": "skip", "max_errors": 0.5}
    with load(url, **skips) as loader, load(url, **skips, processes=0) as threads:
        others = epochs(threads, 1000)
        for _ in range(500):
            is_taken_over = loader.metrics().decode_threads == 2
            for batch in loader:
                assert same(batch, next(others))
                time.sleep(0.01)
            if is_taken_over:
                break
        assert is_taken_over


def test_how_many_depends_on_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_MOST", 32)
    monkeypatch.setattr(images, "usable_memory", lambda: 128 << 30)
    assert [count_image_processes(cores) for cores in (1, 5, 6, 16, 100)] == [0, 0, 5, 15, 32]
    monkeypatch.setattr(images, "usable_memory", lambda: 8 << 30)
    assert count_image_processes(32) == 10
    monkeypatch.setattr(images, "usable_memory", lambda: 100 << 20)
    assert count_image_processes(32) == 0
