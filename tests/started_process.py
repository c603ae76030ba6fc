"""Processes that end with the test that started them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

_MARK = "PENSTOCK_TEST_STARTED"


@contextmanager
def started_process(
    command: Sequence[str | os.PathLike[str]], *, env: Mapping[str, str] | None = None, **options: Any
) -> Iterator[subprocess.Popen[str]]:
    """A process that leads a session and a process group of its own; at the end all that it started is killed with it.

    What it started is known by a mark in its environment, for ranks of torchrun lead groups of their own.
    """
    mark = uuid4().hex
    environment = {**(os.environ if env is None else env), _MARK: mark}
    process = subprocess.Popen(command, env=environment, start_new_session=True, text=True, **options)
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        while left := _marked(mark):  # one that was forked meanwhile is found the next time
            for pid in left:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                with suppress(OSError):  # what was to be written to it
                    stream.close()


def _marked(mark: str) -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError):
            if f"{_MARK}={mark}".encode() in path.read_bytes().split(b"\0"):
                found.append(int(path.parent.name))
    return found


def worker_processes() -> list[int]:
    """The worker processes of this one; other tests may have left servers of their own for the whole session."""
    found: list[int] = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread may end meanwhile
            found += map(int, (task / "children").read_text().split())
    return sorted(pid for pid in found if _is_worker(pid))


def _is_worker(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):  # it may end meanwhile
        return b"workers.main" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False
