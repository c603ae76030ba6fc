"""Runs jobs in fresh processes, and watches the memory of each process tree from outside."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...storage.errors import PenstockError
from .job import Job, Measurement, Pass

_SAMPLE_EVERY_S = 0.1
REASON = "penstock-bench: "  # starts the line in which a process says why it failed
_SIGNATURE = re.compile(r"(?<=X-Amz-)(Signature|Credential|Security-Token)=[^&'\"\s]+")  # of a signed URL


class MeasurementError(PenstockError):
    """A measured process failed; the message has its last output."""


_running: set[subprocess.Popen[bytes]] = set()
_starting = threading.Lock()  # held while a process is started and entered in the set, and while those in it are ended
_ended = threading.Event()


class _StoppedError(MeasurementError):
    """A process was ended, or not started, because of what happened elsewhere."""


def run_job(job: Job, *, timeout_s: float = 3600.0) -> Measurement:
    """Measure in a fresh process and a fresh scratch folder; of several ranks, each in a process of its own.

    Raises:
        MeasurementError: a process failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        jobs = [replace(job, scratch=scratch, rank=rank) for rank in range(job.world_size)]
        stop = threading.Event()
        with ThreadPoolExecutor(len(jobs)) as pool:
            running = [pool.submit(_run_rank, each, timeout_s, stop) for each in jobs]
            try:
                wait(running, return_when=FIRST_EXCEPTION)
            finally:
                stop.set()  # those that wait for a rank that failed; does nothing where all have ended
        # The rank that failed by itself says why, not those that were stopped for its sake.
        failed = [error for each in running if (error := each.exception()) is not None]
        for error in failed:
            if not isinstance(error, _StoppedError):
                raise error
        return combine_ranks([each.result() for each in running])


def _run_rank(job: Job, timeout_s: float, stop: threading.Event) -> Measurement:
    module, what = "penstock.benchmarks.harness.measure", job.contender
    answer, peaks = run_module(module, job.to_json(), what, timeout_s=timeout_s, python=job.python, stop=stop)
    return replace(Measurement.from_dict(answer), peak_bytes=peaks.proportional, peak_rss_bytes=peaks.resident)


def combine_ranks(ranks: Sequence[Measurement]) -> Measurement:
    """The ranks of a job as one measurement: rates until the last of them is done, memory and CPU time together."""
    first, *others = ranks
    if not others:
        return first
    seconds = max(each.seconds for each in ranks)
    passes = [
        Pass(
            samples=sum(each.samples for each in same),
            start_s=min(each.start_s for each in same),
            stop_s=max(each.stop_s for each in same),
            complete=all(each.complete for each in same),
            cpu_s=sum(each.cpu_s for each in same),
        )
        for same in zip(*(each.passes for each in ranks), strict=False)
    ]

    def rate(name: str) -> float:
        return sum(getattr(each, name) * each.seconds for each in ranks) / seconds if seconds else 0.0

    return replace(
        first,
        samples=sum(each.samples for each in ranks),
        payload_bytes=sum(each.payload_bytes for each in ranks),
        batches=sum(each.batches for each in ranks),
        seconds=seconds,
        first_batch_cpu_s=sum(each.first_batch_cpu_s for each in ranks),
        samples_per_s=rate("samples_per_s"),
        mb_per_s=rate("mb_per_s"),
        first_batch_s=max(each.first_batch_s for each in ranks),
        wait_p50_ms=max(each.wait_p50_ms for each in ranks),
        wait_p99_ms=max(each.wait_p99_ms for each in ranks),
        wait_share=max(each.wait_share for each in ranks),
        cpu_s=sum(each.cpu_s for each in ranks),
        peak_bytes=sum(each.peak_bytes for each in ranks),
        peak_rss_bytes=sum(each.peak_rss_bytes for each in ranks),
        passes=passes,
    )


@dataclass(frozen=True)
class Peaks:
    """The most memory of a process tree: proportional set sizes, and the processes' own resident peaks."""

    proportional: int
    resident: int


def run_module(
    module: str,
    message: str,
    what: str,
    *,
    timeout_s: float,
    python: str | None = None,
    stop: threading.Event | None = None,
) -> tuple[dict[str, Any], Peaks]:
    """Run ``python -m module RESULT`` with ``message`` on its standard input. Returns (result, peaks of memory).

    Raises:
        MeasurementError: it failed, took too long, or ``stop`` was set.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("wb") as log_file:
            command = [python or sys.executable, "-m", module, str(result)]
            with _starting:
                if _ended.is_set():
                    raise _StoppedError(f"{what}: all processes were ended")
                process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log_file, stderr=log_file)
                _running.add(process)
            with process, _MemoryWatch(process.pid) as watch:
                try:
                    _attend(process, message, what, timeout_s, stop)
                except BaseException:
                    _kill_tree(process)
                    raise
                finally:
                    _running.discard(process)
        if process.returncode or not result.exists():
            raise MeasurementError(f"{what}: {_last_words(process.returncode, log.read_text(errors='replace'))}")
        return json.loads(result.read_text()), Peaks(watch.peak_bytes, watch.peak_rss_bytes)


@contextlib.contextmanager
def ended_processes() -> Iterator[None]:
    """Kill each process that another thread runs, with its children; none starts while the context is open.

    Those threads get a MeasurementError.
    """
    with _starting:
        _ended.set()
        for process in _running.copy():
            _kill_tree(process)
    try:
        yield
    finally:
        _ended.clear()


def _attend(
    process: subprocess.Popen[bytes], message: str, what: str, timeout_s: float, stop: threading.Event | None
) -> None:
    """Hand over the message, and wait for the end of the process."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended already, and its log says why
        process.stdin.write(message.encode())
        process.stdin.close()
    until = time.monotonic() + timeout_s
    while True:
        left = until - time.monotonic()
        if left <= 0:
            raise MeasurementError(f"{what}: took longer than {timeout_s:.0f} s")
        if stop is not None and stop.is_set():
            raise _StoppedError(f"{what}: another rank failed")
        try:
            process.wait(min(left, 0.2 if stop is not None else left))
        except subprocess.TimeoutExpired:
            continue
        return


def _last_words(returncode: int, log: str) -> str:
    """Explain why a process failed: its sentence for people, or the end of its output, without signatures."""
    lines = _SIGNATURE.sub(r"\1=...", log).strip().splitlines()
    reasons = [line.removeprefix(REASON) for line in lines if line.startswith(REASON)]
    if reasons:
        return reasons[-1]
    if returncode == -signal.SIGKILL:
        return "the process was killed, as the kernel does where memory is short"
    return f"the process ended with exit code {returncode}:\n" + "\n".join(lines[-15:])


def in_short(reason: str) -> str:
    """The first and the last line of a reason: of a traceback in it, the error itself."""
    lines = reason.strip().splitlines()
    return reason if len(lines) < 2 else f"{lines[0]} {lines[-1].strip()}"


class _MemoryWatch:
    """Samples the memory of a process tree on a thread while the context is open.

    Where the memory cannot be read, the peak stays 0, and the measurement continues.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = self.peak_rss_bytes = 0
        self._pid = pid
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="bench-memory", daemon=True)

    def __enter__(self) -> _MemoryWatch:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._stopping.wait(_SAMPLE_EVERY_S):
            try:
                tree = find_tree(self._pid)
                self.peak_bytes = max(self.peak_bytes, sum(map(memory_of, tree)))
                self.peak_rss_bytes = max(self.peak_rss_bytes, sum(map(resident_peak_of, tree)))
            except Exception:  # noqa: BLE001 - a process may end, or be forbidden, at any moment of the look
                continue


def find_tree(pid: int) -> list[int]:
    """A process and all its living descendants."""
    tree, unseen = [], [pid]
    while unseen:
        each = unseen.pop()
        tree.append(each)
        for children in Path(f"/proc/{each}/task").glob("*/children"):
            try:
                unseen += map(int, children.read_text().split())
            except OSError:  # the thread has ended meanwhile
                continue
    return tree


def memory_of(pid: int) -> int:
    """Bytes of a process's anonymous and shared memory; a page shared by n processes counts 1/n for each."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has ended meanwhile
        return 0
    wanted = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith(wanted))


def resident_peak_of(pid: int) -> int:
    """The most bytes of a process that were resident at once, by the kernel's own account; 0 if it has ended."""
    try:
        peak = re.search(r"^VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return 0 if peak is None else int(peak[1]) << 10


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    for pid in find_tree(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
