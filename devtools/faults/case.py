"""Case of the bench, its outcome, and the limits that fail it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .stage import Stage

GAP_S = 30.0
LEFT_S = 45.0  # how long threads and descriptors may last after close()
KEPT_DESCRIPTORS = 2  # the file of a host's budget of requests, and its mapping: a process keeps them


@dataclass(frozen=True, kw_only=True)
class Case:
    """A fault, how it is made, and what must come of it.

    ``inject(stage)`` is called when the processes have started. ``errors``: the classes of which one must be raised;
    empty where the job must continue without an error; ``("killed",)`` where its processes are ended. Where a job ended
    early, it is started again on ``then_ranks`` ranks, without faults, and everything must come out exact.
    ``gap_s`` limits the longest time without a batch, ``error_s`` the seconds from the fault to the error.
    """

    name: str
    group: str
    fault: str
    sees: str = ""  # what a user sees but the wait; empty: nothing
    inject: Callable[[Stage], None]
    prepare: Callable[[Stage], Mapping[str, Any]] = lambda stage: {}
    errors: tuple[str, ...] = ()
    names: str = ""  # what the error's message must hold
    reaches_all: bool = False  # whether every rank must raise an error that names the first cause
    ranks: int = 1
    torchrun: bool = False
    then_ranks: int = 0
    job: Mapping[str, Any] = field(default_factory=dict)
    gap_s: float = GAP_S
    error_s: float = 30.0
    timeout_s: float = 150.0
    skip: Callable[[], str] = lambda: ""
    usual: str = "none"  # the case without a fault whose speed is 1


@dataclass(kw_only=True)
class Outcome:
    """Outcome of a case. Times in seconds; ``failures`` is empty where every limit held."""

    name: str
    group: str
    fault: str
    sees: str
    skipped: str = ""
    ended: str = ""  # "finished", "error" or "killed"
    error: str = ""
    message: str = ""
    attempts: int = 0
    delivered: int = 0
    missing: int = 0
    repeated: int = 0
    wrong: int = 0
    misplaced: int = 0
    replayed: int = 0
    gap_s: float = 0.0
    error_s: float | None = None
    launcher_s: float | None = None  # between hosts: until torchrun's own processes had ended; None: too long
    share_of_speed: float | None = None
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    hedges_won: int = 0
    threads_left: int = 0
    descriptors_left: int = 0
    gone_s: float = 0.0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
