"""Faults of processes: a rank, a worker process or the launcher gets a signal at a random moment."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from .case import Case
from .network_cases import FORBIDDEN, Weather, nothing
from .proxy import FaultProxy
from .stage import Stage, StageError

STOPPED_S = 4.0
_RANKS = 3


def at_a_moment(stage: Stage) -> random.Random:
    """Wait for a random moment of a job that is under way on all ranks; returns the source of chance."""
    draw = random.Random(f"{stage.seed} {stage.folder.name}")
    batches = draw.randrange(20, 100)
    for rank in range(stage.run.ranks):
        stage.run.wait_for(batches, rank)
    time.sleep(draw.random() * 0.05)
    stage.mark()
    return draw


def signal_rank(number: signal.Signals) -> Callable[[Stage], None]:
    def inject(stage: Stage) -> None:
        draw = at_a_moment(stage)
        os.kill(stage.run.pid_of(draw.randrange(stage.run.ranks)), number)

    return inject


def signal_launcher(number: signal.Signals) -> Callable[[Stage], None]:
    def inject(stage: Stage) -> None:
        at_a_moment(stage)
        os.kill(stage.run.process.pid, number)

    return inject


def workers_of(pid: int) -> list[int]:
    """The worker processes of a rank."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            if parent == pid and b"workers.main" in (path.parent / "cmdline").read_bytes():
                found.append(int(path.parent.name))
    return sorted(found)


def signal_worker(number: signal.Signals) -> Callable[[Stage], None]:
    def inject(stage: Stage) -> None:
        draw = at_a_moment(stage)
        os.kill(pick_worker(stage, draw), number)

    return inject


def pick_worker(stage: Stage, draw: random.Random) -> int:
    workers = workers_of(stage.run.pid_of(0))
    if not workers:
        raise StageError("the rank has no worker processes")
    return draw.choice(workers)


def suspend(find: Callable[[Stage, random.Random], int]) -> Callable[[Stage], None]:
    """SIGSTOP, and SIGCONT a few seconds later."""

    def inject(stage: Stage) -> None:
        draw = at_a_moment(stage)
        pid = find(stage, draw)
        os.kill(pid, signal.SIGSTOP)
        time.sleep(STOPPED_S)
        os.kill(pid, signal.SIGCONT)

    return inject


def one_rank_refused(stage: Stage) -> Mapping[str, Any]:
    """Rank 1 reads through a proxy of its own, which refuses it for good after a while; the others lack nothing."""
    other = FaultProxy(stage.proxy_upstream)
    stage.at_end(other.close)
    other.choose(Weather(FORBIDDEN, start=60, began=stage.mark))
    return {"options_of_rank": {"1": {**stage.options, "endpoint": other.url}}}


_WHAT_REMAINS = "torchrun ends the others; the next start continues"
_TOGETHER: dict[str, Any] = {"ranks": _RANKS, "torchrun": True, "job": {"meets": True}, "usual": "none-3-ranks"}


def _killed(name: str, fault: str, inject: Callable[[Stage], None], sees: str = _WHAT_REMAINS) -> Case:
    return Case(
        name=name, group="process", fault=fault, sees=sees, inject=inject, errors=("killed",), then_ranks=2, **_TOGETHER
    )


PROCESS_CASES: list[Case] = [
    Case(name="none-3-ranks", group="none", fault="none, on 3 ranks of torchrun", inject=nothing, **_TOGETHER),
    _killed("kill-rank", "SIGKILL of a rank", signal_rank(signal.SIGKILL)),
    _killed("term-rank", "SIGTERM of a rank", signal_rank(signal.SIGTERM)),
    Case(name="stop-rank", group="process", fault=f"SIGSTOP of a rank for {STOPPED_S:.0f} s",
         inject=suspend(lambda stage, draw: stage.run.pid_of(draw.randrange(stage.run.ranks))),
         **_TOGETHER),
    _killed("term-launcher", "SIGTERM of torchrun", signal_launcher(signal.SIGTERM)),
    Case(name="kill-launcher", group="process", fault="SIGKILL of torchrun, which orphans its ranks",
         sees="the ranks finish", inject=signal_launcher(signal.SIGKILL), **_TOGETHER),
    Case(name="stop-launcher", group="process", fault=f"SIGSTOP of torchrun for {STOPPED_S:.0f} s",
         inject=suspend(lambda stage, draw: stage.run.process.pid), **_TOGETHER),
    Case(name="kill-worker", group="process", fault="SIGKILL of a worker process",
         sees="names the signal and the samples", inject=signal_worker(signal.SIGKILL),
         errors=("WorkerError",), job={"loader": {"processes": 2}}),
    Case(name="term-worker", group="process", fault="SIGTERM of a worker process",
         sees="workers end with their rank", inject=signal_worker(signal.SIGTERM),
         job={"loader": {"processes": 2}}),
    Case(name="stop-worker", group="process",
         fault=f"SIGSTOP of a worker process for {STOPPED_S:.0f} s",
         sees="`loader.activity()` names it; a `WorkerError` after 60 s",
         inject=suspend(pick_worker), job={"loader": {"processes": 2}}),
    Case(name="one-rank-refused", group="process", fault="403 for a rank, for good",
         sees="on all ranks, with the first rank, shard and reason",
         prepare=one_rank_refused, inject=nothing, ranks=_RANKS, torchrun=True,
         job={"group": True, "until_epoch": 30}, errors=("AccessDeniedError",), names="access denied", reaches_all=True,
         then_ranks=2, error_s=10),
]  # fmt: skip
