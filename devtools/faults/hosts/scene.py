"""Plays cases between hosts: a job of torchrun with a rank on each, what befalls them, and what came of it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import penstock
from penstock.tools.audit import audit

from ..account import Line
from ..case import Case, Outcome
from ..data import put_data
from ..network_cases import nothing
from ..stage import StageError
from .hosts import Hosts, is_running, why_no_hosts
from .job import HostJob
from .wire import DEVICE

SAMPLES = 240
SHARD_BYTES = 16_000
PORT = 29400
START_S = 120.0
LAUNCHER_S = 20.0  # how long torchrun is waited for once the ranks have ended
_MESSAGE = re.compile(r"(training stops|RankStoppedError|DatasetError|WorldError): (.*)")


class Scene:
    """A job under way: ``processes`` are torchrun's, of host i the i-th, which has rank i. Times are monotonic."""

    def __init__(self, hosts: Hosts, job: HostJob, count: int, environment: Mapping[str, str]) -> None:
        self.hosts = hosts
        self.job = job
        self.count = count
        self.began_at = 0.0
        self._timer: threading.Timer | None = None
        path = Path(job.folder, f"job-{job.attempt:03d}.json")
        path.write_text(job.to_json())
        self.outputs = [Path(job.folder, f"output-{job.attempt:03d}-host-{host}.txt") for host in range(count)]
        self.processes = []
        for host in range(count):
            endpoint = f"--rdzv-endpoint={hosts.address(0)}:{PORT}"
            command = [
                *(sys.executable, "-m", "torch.distributed.run", f"--nnodes={count}", "--nproc-per-node=1"),
                *("--rdzv-backend=c10d", endpoint, f"--rdzv-conf=is_host={int(host == 0)}"),
                *(f"--local-addr={hosts.address(host)}", "-m", "devtools.faults.hosts.rank", str(path)),
            ]
            with self.outputs[host].open("wb") as output:
                self.processes.append(hosts.start(host, command, output, environment))

    def lines(self, rank: int) -> list[Line]:
        with suppress(OSError):
            return [json.loads(line) for line in self.job.log_of(rank).read_text().split("\n")[:-1] if line]
        return []

    def times(self, rank: int, kind: str) -> list[float]:
        return [line["t"] for line in self.lines(rank) if line["kind"] == kind]

    def wait_for(self, kind: str, count: int = 1) -> None:
        """Wait until every rank has logged something this often, or torchrun has ended somewhere.

        Raises:
            StageError: neither, for too long.
        """
        until = time.monotonic() + START_S
        while any(len(self.times(rank, kind)) < count for rank in range(self.count)):
            if any(process.poll() is not None for process in self.processes):
                return
            if time.monotonic() > until:
                raise StageError(f"waited in vain for {kind!r} of all ranks; the end of {self.tails()}")
            time.sleep(0.02)

    def let_go(self) -> None:
        """Release the ranks that wait for it."""
        Path(self.job.folder, "go").touch()

    def later(self, seconds: float, what: Callable[[], None]) -> None:
        """Do something while the ranks are watched; not if they end before."""
        self._timer = threading.Timer(seconds, what)
        self._timer.start()

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def mark(self) -> None:
        """It begins now."""
        self.began_at = time.monotonic()

    def wait_for_ranks(self, timeout_s: float) -> float | None:
        """The seconds from ``mark`` until no rank's process is left; None where that takes too long."""
        pids = [int(line["pid"]) for rank in range(self.count) for line in self.lines(rank)[:1]]
        until = time.monotonic() + timeout_s
        while any(is_running(pid) for pid in pids):
            if time.monotonic() > until:
                return None
            time.sleep(0.05)
        return time.monotonic() - self.began_at

    def wait_for_launchers(self, timeout_s: float) -> float | None:
        """The same of torchrun's own processes."""
        until = time.monotonic() + timeout_s
        while any(process.poll() is None for process in self.processes):
            if time.monotonic() > until:
                return None
            time.sleep(0.05)
        return time.monotonic() - self.began_at

    def message_of(self, host: int) -> str:
        """The first cause that the output of a host names."""
        found = _MESSAGE.search(self.outputs[host].read_text(errors="replace"))
        return f"{found[1]}: {found[2]}" if found else ""

    def tails(self) -> str:
        return "\n".join(f"{path}:\n{path.read_text(errors='replace')[-800:]}" for path in self.outputs)


@dataclass(frozen=True, kw_only=True)
class HostCase(Case):
    """Case of a fault of hosts, or of the network between them.

    ``befalls(scene)`` is called when the processes have started, and marks when the fault begins. ``says``: by host, a
    pattern that its output must match; empty where the job must continue. ``is_lost``: hosts whose processes are killed
    with it, of which nothing is expected. ``error_s`` limits the time until every rank's process has ended.
    """

    group: str = "hosts"
    inject: Callable[[Any], None] = nothing
    usual: str = ""
    befalls: Callable[[Scene], None]
    says: Mapping[int, str] = field(default_factory=dict)
    count: int = 2
    skip: Callable[[], str] = why_no_hosts


def play_on_hosts(case: HostCase, folder: Path) -> Outcome:
    """Play a case and judge it. A job that it ended resumes on one host less, and the result must be exact."""
    outcome = Outcome(name=case.name, group=case.group, fault=case.fault, sees=case.sees, skipped=case.skip())
    if outcome.skipped:
        return outcome
    started = time.monotonic()
    place = folder / case.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    source = str(place / "data")
    fields: dict[str, Any] = {"folder": str(place), "source": source, **case.job}
    job = HostJob(**fields)
    put_data(source, {}, samples=SAMPLES, size=job.sample_bytes, shard_bytes=SHARD_BYTES)
    try:
        with Hosts(case.count) as hosts, closing(Scene(hosts, job, case.count, _environment())) as scene:
            case.befalls(scene)
            _note_end(case, scene, outcome)
        if outcome.ended != "finished":
            _go_on(case, scene, outcome)
    except (StageError, OSError, subprocess.SubprocessError) as exc:
        outcome.failures.append(f"the bench failed: {type(exc).__name__}: {exc}")
    _account(place, outcome)
    outcome.failures += _list_failures(case, outcome)
    outcome.seconds = time.monotonic() - started
    return outcome


def _note_end(case: HostCase, scene: Scene, outcome: Outcome) -> None:
    outcome.attempts = 1
    ended_s = scene.wait_for_ranks(case.timeout_s)
    if ended_s is None:
        outcome.failures.append(f"ranks were left after {case.timeout_s:.0f} s; the end of {scene.tails()}")
    outcome.launcher_s = None if ended_s is None else scene.wait_for_launchers(LAUNCHER_S)
    ranks = range(case.count)
    outcome.wrong = sum(line.get("wrong", 0) for rank in ranks for line in scene.lines(rank))
    outcome.gap_s = max(_longest_gap_s(scene.times(rank, "batch")) for rank in ranks)
    if all(scene.times(rank, "done") for rank in ranks):
        outcome.ended = "finished"
        return
    outcome.error_s = ended_s
    messages = {host: scene.message_of(host) for host in ranks}
    outcome.ended = "error" if any(messages.values()) else "killed"
    outcome.message = "; ".join(f"host {host}: {text}" for host, text in messages.items() if text)
    outcome.error = "StallError" if "training stops: " in outcome.message else _first_kind(messages)
    for host, pattern in case.says.items():
        if not re.search(pattern, messages[host]):
            outcome.failures.append(f"host {host} did not say {pattern!r}: {messages[host] or scene.tails()}")


def _first_kind(messages: Mapping[int, str]) -> str:
    return next((text.partition(":")[0] for text in messages.values() if text), "")


def _go_on(case: HostCase, scene: Scene, outcome: Outcome) -> None:
    """Go on from where every rank came, on one host less and without the network between them."""
    outcome.attempts = 2
    job = replace(scene.job, attempt=1, waits_at="")
    if not job.trains:
        states = [
            [line["state"] for line in scene.lines(rank) if line["kind"] == "batch"] for rank in range(case.count)
        ]
        reached = min(len(each) for each in states)
        job = replace(job, state=states[0][reached - 1] if reached else None)
    path = Path(job.folder, "job-001.json")
    path.write_text(job.to_json())
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={case.count - 1}"),
        *("-m", "devtools.faults.hosts.rank", str(path)),
    ]
    environment = {name: value for name, value in _environment().items() if name != "GLOO_SOCKET_IFNAME"}
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=case.timeout_s, check=False
        )
    except subprocess.TimeoutExpired:
        outcome.failures.append("it did not go on on one host less")
        return
    if done.returncode != 0:
        outcome.failures.append(f"it did not go on on one host less: {done.stderr[-1500:]}")


def _account(place: Path, outcome: Outcome) -> None:
    try:
        report = audit(place / "audit")
    except (OSError, penstock.PenstockError) as exc:
        outcome.failures.append(f"what was delivered cannot be told: {exc}")
        return
    for epoch in report.epochs:
        outcome.delivered += epoch.delivered
        outcome.missing += epoch.missing
        outcome.repeated += epoch.duplicated
        outcome.replayed += epoch.replayed


def _list_failures(case: HostCase, outcome: Outcome) -> list[str]:
    """The limits that did not hold."""
    found = [
        f"{getattr(outcome, name)} samples {name}"
        for name in ("missing", "repeated", "wrong")
        if getattr(outcome, name)
    ]
    if not outcome.delivered:
        found.append("nothing was delivered")
    if (outcome.ended != "finished") != bool(case.says):
        found.append(f"it ended as {outcome.ended} {outcome.error}: {outcome.message[:300]}")
    if outcome.error_s is not None and outcome.error_s > case.error_s:
        found.append(f"ranks were left for {outcome.error_s:.0f} s; the limit is {case.error_s:.0f} s")
    if outcome.ended == "finished" and outcome.gap_s > case.gap_s:
        found.append(f"{outcome.gap_s:.0f} s without a batch; the limit is {case.gap_s:.0f} s")
    return found


def _longest_gap_s(times: Sequence[float]) -> float:
    return max((later - earlier for earlier, later in pairwise(times)), default=0.0)


def _environment() -> dict[str, str]:
    root = str(Path(penstock.__file__).parents[1])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
    names = {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "GLOO_SOCKET_IFNAME": DEVICE, "PYTHONPATH": path}
    return {**os.environ, **names}
