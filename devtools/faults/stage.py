"""Stage of a case of the bench: the proxy before the real server, the data, and the reading processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.loader.order.state import unseal
from penstock.storage.errors import PenstockError

from .account import Attempt, Line, Position
from .data import SAMPLE_BYTES, SAMPLES
from .job import Job
from .proxy import FaultProxy

START_S = 90.0
_READER = "devtools.faults.reader"


class StageError(PenstockError):
    """The bench itself could not do what a case needs; nothing is said about the loader."""


class Run:
    """One attempt: the processes of a job, and their logs as far as they are written."""

    def __init__(self, job: Job, ranks: int, *, torchrun: bool, prefix: Sequence[str] = ()):
        self.job = job
        self.ranks = ranks
        path = Path(job.folder, f"job-{job.attempt:03d}.json")
        path.write_text(job.to_json())
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if torchrun else []
        command = [*prefix, sys.executable, *launcher, "-m", _READER, str(path)]
        self.output = Path(job.folder, f"output-{job.attempt:03d}.txt")
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        environment.pop("RANK", None)
        with self.output.open("wb") as output:
            # A session of its own, so that whatever it leaves behind can be ended with it.
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )

    def lines(self, rank: int) -> list[Line]:
        """Lines that a rank has written so far, without one that is still being written."""
        try:
            text = self.job.log_of(rank).read_text()
        except OSError:
            return []
        return [json.loads(line) for line in text.split("\n")[:-1] if line]

    def count_batches(self, rank: int = 0) -> int:
        return sum(line["kind"] == "batch" for line in self.lines(rank))

    def wait_for(self, batches: int, rank: int = 0, timeout_s: float = START_S) -> None:
        """Wait until a rank has had some batches, or its process has ended.

        Raises:
            StageError: neither, for too long.
        """
        self.wait_until(lambda: self.count_batches(rank) >= batches, f"{batches} batches", timeout_s)

    def wait_until(self, is_so: Callable[[], bool], what: str, timeout_s: float = START_S) -> None:
        until = time.monotonic() + timeout_s
        while not is_so() and self.process.poll() is None:
            if time.monotonic() > until:
                raise StageError(f"waited for {what} in vain for {timeout_s:.0f} s; the end of {self.tail()}")
            time.sleep(0.02)

    def pid_of(self, rank: int) -> int:
        """The process of a rank that has started."""
        self.wait_until(lambda: bool(self.lines(rank)), f"rank {rank}'s start")
        lines = self.lines(rank)
        if not lines:
            raise StageError(f"rank {rank} ended before it began; the end of {self.tail()}")
        return int(lines[0]["pid"])

    def join(self, timeout_s: float) -> bool:
        """Wait for all processes to end; those that do not are killed, and False is returned."""
        until = time.monotonic() + timeout_s
        while self.members() and time.monotonic() < until:
            self.process.poll()
            time.sleep(0.05)
        left = self.members()
        self.kill()
        return not left

    def kill(self) -> None:
        """End all that is left of it."""
        for pid in self.members():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def members(self) -> list[int]:
        """The processes of its session that still run: torchrun gives its ranks sessions of their own."""
        known = {self.process.pid, *(int(lines[0]["pid"]) for lines in map(self.lines, range(self.ranks)) if lines)}
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            with suppress(OSError, ValueError):
                state, _, group, session = stat.read_text().rpartition(")")[2].split()[:4]
                if state not in "ZX" and {int(group), int(session), int(stat.parent.name)} & known:
                    found.append(int(stat.parent.name))
        return found

    def tail(self) -> str:
        return f"{self.output}:\n{self.output.read_text(errors='replace')[-1500:]}"


class Stage:
    """One case's scene: starts attempts one after another, each from where all ranks of the last one came.

    Mutable state: the attempts so far, when the fault began, and what to undo.
    """

    def __init__(self, *, proxy: FaultProxy, url: str, direct: Mapping[str, Any], folder: Path, seed: int) -> None:
        self.proxy = proxy
        self.url = url
        self.direct = dict(direct)
        self.folder = folder
        self.seed = seed
        self.began_at: float | None = None
        self.runs: list[Run] = []
        self.starts: list[Position] = []
        self.beside: list[Run] = []
        self._undo: list[Callable[[], None]] = []

    @property
    def options(self) -> dict[str, Any]:
        """Storage options that lead through the proxy."""
        return {**self.direct, "endpoint": self.proxy.url}

    @property
    def proxy_upstream(self) -> str:
        """The real server."""
        return str(self.direct["endpoint"])

    @property
    def run(self) -> Run:
        """The newest attempt."""
        return self.runs[-1]

    def mark(self) -> None:
        """The fault begins now."""
        self.began_at = time.monotonic()

    def at_end(self, undo: Callable[[], None]) -> None:
        self._undo.append(undo)

    def make_job(self, **fields: Any) -> Job:
        job = Job(
            url=self.url,
            options=self.options,
            folder=str(self.folder),
            direct=self.direct,
            samples=SAMPLES,
            sample_bytes=SAMPLE_BYTES,
        )
        return replace(job, **fields)

    def start(self, ranks: int = 1, *, torchrun: bool = False, **fields: Any) -> Run:
        """Start the next attempt."""
        how = {"prefix": fields.pop("prefix", ())}
        start: Position = (0, 0)
        if self.runs:
            start, fields["state"] = self._reached()
        job = self.make_job(**{**fields, "attempt": len(self.runs)})
        self.runs.append(Run(job, ranks, torchrun=torchrun, **how))
        self.starts.append(start)
        return self.run

    def _reached(self) -> tuple[Position, Mapping[str, Any] | None]:
        """Position that every rank of the last attempt reached, and the loader's state there; None without data."""
        reached = self.attempts()[-1].reached
        states = [line["state"] for run in self.runs for line in run.lines(0) if line["kind"] == "open"]
        if not states:
            return reached, None
        epoch, consumed = reached
        upcoming = (epoch + 1, 0) if consumed == SAMPLES else reached
        return reached, {**unseal(states[-1]), "epoch": upcoming[0], "consumed": upcoming[1]}

    def attempts(self) -> list[Attempt]:
        return [
            Attempt(start=start, ranks=[run.lines(rank) for rank in range(run.ranks)])
            for start, run in zip(self.starts, self.runs, strict=True)
        ]

    def start_beside(self, name: str, **fields: Any) -> Run:
        """Start another job at the same time, with a folder of its own."""
        folder = self.folder / name
        folder.mkdir()
        run = Run(self.make_job(**{**fields, "folder": str(folder)}), 1, torchrun=False)
        self.beside.append(run)
        return run

    def close(self) -> None:
        """End what still runs, and undo what was done to the machine."""
        for run in [*self.runs, *self.beside]:
            run.kill()
        for undo in reversed(self._undo):
            undo()
