"""Worker processes: the same batches as threads make, the same errors, and nothing left of them."""

from __future__ import annotations

import io
import itertools
import os
import re
import signal
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import row_functions
import torch
from equal_batches import assert_equal
from started_process import started_process, worker_processes
from started_threads import started_threads
from tar_dataset import write_tars

from penstock import DistributedDataLoader, ImageDecoder
from penstock.loader import BadSampleWarning
from penstock.loader.decoding.workers import pool as worker_pool
from penstock.loader.decoding.workers import process as worker_process
from penstock.loader.errors import ConfigError, DecodeError, LoaderClosedError, WorkerError

SIZES = [37, 5, 80, 1, 64]


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> str:
    import cv2

    folder = tmp_path_factory.mktemp("images")
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(12):
            pixels = np.random.default_rng(number).integers(0, 255, (40 + number, 50, 3), np.uint8)
            for name, data in ((f"{number:03d}.jpg", cv2.imencode(".jpg", pixels)[1]), (f"{number:03d}.cls", b"3")):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(bytes(data)))
    return str(folder)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    "options",
    [
        {"transform": row_functions.augment},
        {"decode": {"bin": row_functions.reverse_bytes}},
        {"transform": row_functions.make_tensors},
        {"transform": row_functions.augment, "last_batch": "pad", "with_ids": True},
    ],
)
def test_processes_give_what_threads_give_in_the_same_order(tars, options):
    def epochs(**how: Any) -> list[Any]:
        with DistributedDataLoader(tars, batch_size=16, **options, **how) as loader:
            return [*loader, *loader]

    for one, other in zip(epochs(), epochs(processes=2), strict=True):
        assert_equal(one, other)


def test_images_decoded_by_processes_are_those_of_threads(images):
    decode = {"jpg": ImageDecoder(size=24, crop="random", flip=0.5)}

    def batches(**how: Any) -> list[Any]:
        with DistributedDataLoader(images, batch_size=4, decode=decode, **how) as loader:
            return list(loader)

    for one, other in zip(batches(), batches(processes=2), strict=True):
        assert one["jpg"].shape == (4, 3, 24, 24)
        assert_equal(one, other)


@pytest.mark.slow
def test_a_stopped_worker_is_named_while_it_is_waited_for_and_then_an_error(tars, monkeypatch):
    monkeypatch.setattr(worker_process, "STOPPED_S", 3.0)
    naming = row_functions.rest_and_name_the_process
    with DistributedDataLoader(tars, batch_size=16, transform=naming, processes=2) as loader:
        workers: set[int] = set()
        while len(workers) < 2:  # both have started
            workers.update(*(batch["process"].tolist() for batch in loader))
        batches = iter(loader)
        next(batches)
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        told: list[str] = []
        watched, has_ended = re.compile(r"samples \d.*; stopped worker processes, .*kill -CONT \d+"), threading.Event()

        def watch() -> None:
            while not has_ended.wait(0.05):
                told.append(loader.activity().get("waiting_for", ""))

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with pytest.raises(WorkerError, match=r"process \d+ has been stopped for 3 s.* on \d+ samples from \d"):
                list(batches)
        finally:
            has_ended.set()
            watcher.join()
    assert any(map(watched.search, told))
    assert worker_processes() == []


@pytest.mark.slow
def test_a_worker_that_is_stopped_and_continued_loses_nothing(tars, monkeypatch):
    monkeypatch.setattr(worker_process, "STOPPED_S", 60.0)
    with DistributedDataLoader(tars, batch_size=16, transform=row_functions.rest_a_moment, processes=2) as loader:
        batches = iter(loader)
        count = len([next(batches)])
        workers = worker_processes()
        for worker in workers:
            os.kill(worker, signal.SIGSTOP)
        threading.Timer(3.0, lambda: [os.kill(worker, signal.SIGCONT) for worker in workers]).start()
        assert count + len(list(batches)) == len(loader)


def test_processes_do_not_import_torch_and_outlive_a_move(tars):
    with DistributedDataLoader(tars, batch_size=16, decode={"bin": row_functions.reverse_bytes}, processes=2) as loader:
        first = next(iter(loader))
        workers = worker_processes()
        loader.set_epoch(3)
        next(iter(loader))
        assert worker_processes() == workers
        loader.set_epoch(0)
        assert_equal(next(iter(loader)), first)
        mapped = [Path(f"/proc/{pid}/maps").read_text() for pid in workers]
        assert not any("libtorch" in maps for maps in mapped)
        loop = os.getpriority(os.PRIO_PROCESS, 0)
        deadline_s = time.monotonic() + 60  # one that had nothing to do yet may still be starting
        while (found := {os.getpriority(os.PRIO_PROCESS, pid) for pid in workers}) != {min(19, loop + 10)}:
            assert time.monotonic() < deadline_s, found
            time.sleep(0.05)
    assert worker_processes() == []


@pytest.mark.parametrize("processes", [0, 2])
def test_errors_name_the_sample_and_are_alike_from_threads_and_processes(tars, processes):
    def first_error(kind: type[Exception], **options: Any) -> Exception:
        with (
            DistributedDataLoader(tars, batch_size=64, shuffle=False, processes=processes, **options) as loader,
            pytest.raises(kind) as caught,
        ):
            list(loader)
        return caught.value

    where = "sample 7 (number 7 of shard-00000.tar, key '00000007')"
    error = first_error(LookupError, transform=row_functions.fail_at_seven)
    assert error.args == ("seven is not wanted",)
    assert f"in transform= of {where}" in error.__notes__
    assert "number 0 of shard-00000.tar" in str(first_error(ConfigError, transform=row_functions.return_a_list))
    assert where.replace("7", "0") in str(first_error(DecodeError, decode={"bin": int}))


@pytest.mark.parametrize("transform", [row_functions.fail_at_seven, row_functions.make_unsendable])
def test_where_samples_may_be_dropped_batches_before_an_error_are_whole(tars, transform):
    options = {"batch_size": 1, "shuffle": False, "lanes": 1, "transform": transform, "may_drop": True}
    with DistributedDataLoader(tars, processes=1, **options) as loader:
        batches = iter(loader)
        assert [next(batches)["txt"] for _ in range(7)] == [[str(number)] for number in range(7)]
        with pytest.raises((LookupError, DecodeError), match=r"not wanted|sample 7 "):
            next(batches)


@pytest.mark.parametrize("processes", [0, 1])
def test_samples_that_are_bad_are_told_though_one_after_them_ends_the_run(tars, processes):
    options = {"batch_size": 2, "shuffle": False, "lanes": 1, "transform": row_functions.fail_at_three_end_at_seven}
    with DistributedDataLoader(tars, processes=processes, on_error="skip", **options) as loader:
        batches = iter(loader)
        with pytest.warns(BadSampleWarning):
            assert [next(batches)["txt"] for _ in range(3)] == [["0", "1"], ["2", "4"], ["5", "6"]]
        assert [bad.id for bad in loader.bad_samples] == [3]
        with pytest.raises(ConfigError, match="transform= returned list"):
            next(batches)


def test_what_cannot_be_sent_back_is_an_error_of_our_own(tars):
    def first_error(transform: Callable[..., Any]) -> DecodeError:
        with (
            DistributedDataLoader(tars, batch_size=64, shuffle=False, processes=1, transform=transform) as loader,
            pytest.raises(DecodeError) as caught,
        ):
            list(loader)
        return caught.value

    assert "sample 7 (number 7 of shard-00000.tar" in str(first_error(row_functions.make_unsendable))
    odd = first_error(row_functions.fail_oddly)
    assert str(odd) == "OddError: this and that"
    assert any("sample 0" in note for note in odd.__notes__)


@pytest.mark.parametrize("options", [{"transform": lambda sample: sample}, {"decode": {"txt": lambda data: data}}])
def test_functions_that_cannot_be_sent_are_refused_at_once(tars, options):
    with pytest.raises(ConfigError, match="define it at the top level of a module"):
        DistributedDataLoader(tars, batch_size=16, processes=2, **options)
    with pytest.raises(ConfigError, match="processes=-1"):
        DistributedDataLoader(tars, batch_size=16, processes=-1)


def test_a_killed_worker_is_an_error_at_once(tars):
    with DistributedDataLoader(
        tars, batch_size=16, shuffle=False, processes=2, transform=row_functions.kill_at_hundred
    ) as loader:
        with pytest.raises(WorkerError, match=r"was killed by SIGKILL while it worked on \d+ samples"):
            list(loader)
        with pytest.raises(WorkerError):
            list(loader)
    assert worker_processes() == []


def test_a_worker_killed_while_idle_is_an_error_of_the_next_batch_and_no_hang(tars):
    with DistributedDataLoader(tars, batch_size=4, processes=2, transform=row_functions.keep) as loader:
        next(iter(loader))
        for pid in worker_processes():
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(WorkerError, match="SIGKILL"):
            list(itertools.chain.from_iterable(loader for _ in range(10)))


def test_closing_ends_workers_that_are_busy(tars):
    loader = DistributedDataLoader(tars, batch_size=64, processes=2, transform=row_functions.sleep_for_minutes)
    threading.Timer(1.0, loader.close).start()
    started = time.monotonic()
    with pytest.raises(LoaderClosedError):
        list(loader)
    assert time.monotonic() - started < 60
    loader.close()
    assert worker_processes() == []
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


@pytest.mark.slow
def test_closing_while_workers_start_leaves_none(tars, monkeypatch):
    begun: list[worker_process.Worker] = []
    loader = DistributedDataLoader(tars, batch_size=64, processes=2, transform=row_functions.rest_a_moment)

    def start_and_close() -> worker_process.Worker:
        if begun:
            loader.close()  # as a signal's handler may
        begun.append(worker_process.start_process())
        return begun[-1]

    monkeypatch.setattr(worker_pool, "start_process", start_and_close)
    with pytest.raises(LoaderClosedError):
        next(iter(loader))
    assert len(begun) == 2
    assert None not in [worker.process.poll() for worker in begun]
    assert not [thread.name for thread in started_threads() if thread.name.startswith("penstock")]


def test_workers_that_ignore_signals_end_with_their_killed_parent(tars, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time\n"
        "from penstock import DistributedDataLoader\n"
        "def mark(sample):\n"
        "    import os\n"
        "    return {'process': os.getpid()}\n"
        "def rest(sample):\n"
        "    time.sleep(0.05)\n"
        "    return mark(sample)\n"
        "if __name__ == '__main__':\n"
        "    loader = DistributedDataLoader(sys.argv[1], batch_size=16, processes=2, transform=rest)\n"
        "    for batch in loader:\n"
        "        print(*set(batch['process'].tolist()), flush=True)\n"
    )
    with started_process([sys.executable, script, tars], stdout=subprocess.PIPE) as parent:
        workers = {int(pid) for pid in parent.stdout.readline().split()}
        assert workers
        for pid in workers:
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        assert parent.stdout.readline()
        parent.kill()
        until = time.monotonic() + 30
        while any(is_running(pid) for pid in workers):
            assert time.monotonic() < until
            time.sleep(0.05)


def test_a_worker_ends_without_a_warning_where_warnings_are_shown():
    program = "import socket; from penstock.loader.decoding.workers.main import main; "
    program += "ours, theirs = socket.socketpair(); ours.close(); main(theirs.detach())"
    command = [sys.executable, "-W", "always::ResourceWarning", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.stderr == ""


@pytest.mark.full
def test_tensors_that_functions_make_have_the_dtype_that_the_program_has_set(tars):
    torch.set_default_dtype(torch.float64)
    try:
        options = {"transform": row_functions.make_default_floats, "processes": 1}
        with DistributedDataLoader(tars, batch_size=16, **options) as loader:
            assert next(iter(loader))["half"].dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.full
@pytest.mark.parametrize("how", ["processes=1", "place='process'"])
def test_functions_of_a_script_that_is_no_file_are_refused_by_where_they_are(tars, how):
    script = (
        "from penstock import DistributedDataLoader\n"
        "def mark(sample):\n"
        "    return {'number': int(sample['txt'])}\n"
        f"next(iter(DistributedDataLoader({tars!r}, batch_size=16, {how}, transform=mark)))\n"
    )
    done = subprocess.run([sys.executable], input=script, capture_output=True, text=True, timeout=120, check=False)
    assert "ConfigError: a function of the loader is defined in <stdin>, where another process cannot" in done.stderr


@pytest.mark.parametrize("how", ["processes=0", "processes=2", pytest.param("place='process'", marks=pytest.mark.full)])
def test_a_script_without_a_guard_runs_with_threads_and_is_told_what_to_do_with_processes(tars, tmp_path, how):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\n"
        "from penstock import DistributedDataLoader\n"
        "def mark(sample):\n"
        "    return {'number': int(sample['txt'])}\n"
        f"loader = DistributedDataLoader({tars!r}, batch_size=16, {how}, transform=mark)\n"
        "print(sum(1 for batch in loader))\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=120, check=False)
    if how != "processes=0":
        assert done.returncode == 1
        assert "ConfigError: a loader with processes= or place= was created" in done.stderr
        assert "if __name__ == '__main__'" in done.stderr
    else:
        assert (done.returncode, done.stdout.strip()) == (0, str(sum(SIZES) // 16))
