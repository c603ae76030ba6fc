"""Runs jobs in fresh processes, and watches the memory of each process tree from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..storage.errors import PenstockError
from .job import Job, Measurement

_SAMPLE_EVERY_S = 0.1
TOLD = "penstock-bench: "  # starts the line in which a process says why it failed
_SIGNATURE = re.compile(r"(?<=X-Amz-)(Signature|Credential|Security-Token)=[^&'\"\s]+")  # of a signed URL


class MeasurementError(PenstockError):
    """A measured process failed; the message has its last output."""


def run_job(job: Job, *, timeout_s: float = 3600.0) -> Measurement:
    """Measure in a fresh process and a fresh scratch folder.

    Raises:
        MeasurementError: the process failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as scratch:
        answer, peak_bytes = run_module(
            "penstock.benchmarks.measure", replace(job, scratch=scratch).to_json(), job.contender, timeout_s=timeout_s
        )
    return replace(Measurement.from_dict(answer), peak_bytes=peak_bytes)


def run_module(module: str, message: str, what: str, *, timeout_s: float) -> tuple[dict[str, Any], int]:
    """Run ``python -m module RESULT`` with ``message`` on its standard input. Returns (result, peak memory).

    Raises:
        MeasurementError: it failed or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        with log.open("wb") as log_file:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(result)], stdin=subprocess.PIPE, stdout=log_file, stderr=log_file
            )
            with process, _MemoryWatch(process.pid) as watch:
                try:
                    process.communicate(message.encode(), timeout=timeout_s)
                except BaseException as exc:
                    _kill_tree(process)
                    if isinstance(exc, subprocess.TimeoutExpired):
                        raise MeasurementError(f"{what}: took longer than {timeout_s:.0f} s") from exc
                    raise
        if process.returncode or not result.exists():
            raise MeasurementError(f"{what}: {_last_words(process.returncode, log.read_text(errors='replace'))}")
        return json.loads(result.read_text()), watch.peak_bytes


def _last_words(returncode: int, log: str) -> str:
    """Why a process failed: the sentence that it said for people, or the end of what it printed."""
    lines = log.strip().splitlines()
    told = [line.removeprefix(TOLD) for line in lines if line.startswith(TOLD)]
    if told:
        return told[-1]
    return f"the process ended with exit code {returncode}:\n" + "\n".join(lines[-15:])


class _MemoryWatch:
    """Samples the memory of a process tree on a thread while the context is open.

    Where the memory cannot be read, the peak stays 0, and the measurement goes on.
    """

    def __init__(self, pid: int) -> None:
        self.peak_bytes = 0
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
                self.peak_bytes = max(self.peak_bytes, sum(map(memory_of, find_tree(self._pid))))
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


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    for pid in find_tree(process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()
