"""Guard a run: catch signals, watch the other ranks, and tell a long compilation or an early end from a hang."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from ..checkpoint.traffic import TRAFFIC
from ..errors import TrainerError
from ..ranks.mesh import MeshSizes
from ..ranks.world import World
from ..report.progress import Progress
from ..stopwatch import Stopwatch
from ..watch.heartbeat import Beat
from ..watch.stop_flag import StopFlag, TraceFlag
from ..watch.watchdog import Activity, Advance, Watchdog

_OF_BYTES = ("checkpoint", "checkpoint lock", "resume", "read checkpoint", "warm start", "export")
_STEPPING = frozenset({"microbatches", "forward", "backward", "reduce", "optimizer"})
_POLL_S = 0.02
_LOOK_S = 0.25  # beats, a request or two for each rank, come less often than that
PHASES = ("forward", "backward", "evaluate", "optimizer")
"""Phases that compile: those that run something for the first time, or on other shapes."""


class Compiling:
    """Listens to torch.compile in this process; one is enough for it, and any thread may read it.

    All mutable state: the seconds of compilations that are over, and since when one is under way. One thread compiles
    at a time, and what it compiles on the way counts as part of it.
    """

    def __init__(self) -> None:
        self._state: tuple[float, float | None] = (0.0, None)

    def listen(self) -> None:
        """Begin to listen, unless that was done; ``torch._dynamo.reset`` ends it."""
        from torch._dynamo.callback import callback_handler

        if self._begin not in callback_handler.start_callbacks:
            callback_handler.register_start_callback(self._begin)
            callback_handler.register_end_callback(self._end)

    def advance(self, limit_s: float) -> int:
        """Progress that grows while something is compiled, for at most ``limit_s`` seconds of one compilation."""
        over_s, since_s = self._state
        running_s = 0.0 if since_s is None else min(time.monotonic() - since_s, limit_s)
        return int(1000 * (over_s + running_s))

    def activity(self) -> dict[str, Any]:
        """Seconds of the compilation that is under way; empty if there is none."""
        since_s = self._state[1]
        return {} if since_s is None else {"compiling_s": round(time.monotonic() - since_s, 1)}

    def _begin(self, arguments: object) -> None:
        self._state = (self._state[0], time.monotonic())

    def _end(self, arguments: object) -> None:
        over_s, since_s = self._state
        self._state = (over_s + (0.0 if since_s is None else time.monotonic() - since_s), None)


COMPILING = Compiling()
"""All that this process compiles."""


class Guard:
    """A stop flag and a watchdog while its context lasts; it may be entered again. Entering is a collective.

    The stopwatch tells the watchdog each phase of this rank, with its step and epoch; ``activities`` add details to the
    phases that they are named for, and ``progress_of`` tells how far those have come. With ``traces`` a SIGUSR2 asks
    for a trace. ``sizes`` are those of the mesh, by which ranks are named.
    """

    def __init__(
        self,
        world: World,
        progress: Progress,
        stopwatch: Stopwatch,
        *,
        stall_timeout_s: float | None,
        report_folder: Path,
        activities: Mapping[str, Activity],
        progress_of: Mapping[str, Advance],
        traces: bool = False,
        sizes: MeshSizes | None = None,
    ) -> None:
        self._world = world
        self._sizes = MeshSizes(dp=world.world_size) if sizes is None else sizes
        self._progress = progress
        self._stopwatch = stopwatch
        self._stall_timeout_s = stall_timeout_s
        self._report_folder = report_folder
        self._activities = activities
        self._progress_of = progress_of
        self._traces = traces
        self._watchdog: Watchdog | None = None
        self._flag: StopFlag | None = None
        self._trace_flag: TraceFlag | None = None
        self._stack = ExitStack()

    def is_stop_requested(self) -> bool:
        """Return whether this rank got a signal that asks it to stop."""
        return self._flag is not None and self._flag.reason is not None

    def stop_signal(self) -> str:
        """The signal that asked to stop, in words: another rank may have got it."""
        reason = None if self._flag is None else self._flag.reason
        return reason or "a signal that another rank got"

    def is_trace_requested(self) -> bool:
        """Return whether this rank got a signal that asks for a trace since the last call."""
        return self._trace_flag is not None and self._trace_flag.take()

    def check_end(self, given: int, length: int) -> None:
        """See that all ranks end this epoch here, as this one does after fewer batches than its loader's length.

        Raises:
            TrainerError: another rank continues with this step, and would wait for this one.
        """
        if self._watchdog is None or self._world.world_size == 1:
            return
        step, epoch, rank = self._progress.step, self._progress.epoch, self._world.rank
        others = [one for one in range(self._world.world_size) if one != rank]
        found = find_stepping(self._watchdog.store, others, f"end/{epoch}/{step}", rank=rank, step=step)
        if found is not None:
            raise TrainerError(
                f"step {step}: in epoch {epoch} the loader of {self._sizes.describe(rank)} gave {given} batches and "
                f"len(loader) says {length}, and {self._sizes.describe(found)} has one more; give every rank as many, "
                "or take the length away, so that an epoch ends on all ranks with the first of them"
            )

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            flag = stack.enter_context(StopFlag())
            trace_flag = stack.enter_context(closing(TraceFlag())) if self._traces else None
            if self._stall_timeout_s is not None:
                self._watchdog = stack.enter_context(self._start_watchdog(self._stall_timeout_s))
            self._flag, self._trace_flag, self._stack = flag, trace_flag, stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watchdog, self._flag, self._trace_flag, self._stopwatch.entered = None, None, None, None
        self._stack.__exit__(kind, error, trace)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Let the ranks watch each other, with signals left as they are; entering is a collective.

        For what comes before or after training: a rank that fails or hangs there ends the others with its name.
        Within training they do so already.
        """
        if self._stall_timeout_s is None or self._watchdog is not None:
            yield
            return
        watchdog = self._start_watchdog(self._stall_timeout_s)
        try:
            # Alone, no other rank needs to learn of an error.
            with watchdog if self._world.world_size > 1 else closing(watchdog):
                yield
                self._wait_for_all()
        finally:
            self._stopwatch.entered = None

    def _wait_for_all(self) -> None:
        """Nobody stops watching before all are through."""
        if self._world.world_size > 1:
            self._stopwatch.enter("construction")
            dist.all_gather_object([None] * self._world.world_size, None)

    def _start_watchdog(self, stall_timeout_s: float) -> Watchdog:
        COMPILING.listen()
        place = self._sizes.describe_place(self._world.rank)
        watchdog = Watchdog(self._world, stall_timeout_s, report_folder=self._report_folder, place=place)
        progress, activities, progress_of = self._progress, self._activities, self._progress_of
        self._stopwatch.entered = lambda name: watchdog.phase(
            name,
            step=progress.step,
            epoch=progress.epoch,
            activity=activities.get(name),
            progress=progress_of.get(name),
        )
        return watchdog


def list_activities(loader: object, evaluation: object | None, module: Activity) -> dict[str, Activity]:
    """By phase, the ``activity`` of the loader and of the evaluation's batches, if they have one, and what is compiled.

    ``module`` names the module that forward is in.
    """
    sources = {"fetch": loader, "evaluation fetch": getattr(evaluation, "batches", None)}
    found = {phase: getattr(source, "activity", None) for phase, source in sources.items()}
    activities: dict[str, Activity] = {phase: activity for phase, activity in found.items() if callable(activity)}
    activities |= dict.fromkeys(PHASES, COMPILING.activity)
    return activities | {"forward": lambda: {**module(), **COMPILING.activity()}}


def list_advances(compiles_s: float) -> dict[str, Advance]:
    """Progress of phases that may be long: bytes of checkpoints and exports, compilations within ``compiles_s``."""

    def count_bytes() -> int:
        return TRAFFIC.bytes

    def count_compilations() -> int:
        return COMPILING.advance(compiles_s)

    return dict.fromkeys(_OF_BYTES, count_bytes) | dict.fromkeys(PHASES, count_compilations)


def find_stepping(store: PrefixStore, others: list[int], key: str, *, rank: int, step: int) -> int | None:
    """Announce that this rank has no batch for ``step``; wait until no rank has one, or one is in that step.

    ``store`` is a watchdog's, whose beats it reads, and ``key`` names this end of an epoch. Returns the rank that is in
    the step, or None where there is none, or a verdict was spoken meanwhile. Not a collective.
    """
    store.set(f"{key}/{rank}", "")
    ends = {other: f"{key}/{other}" for other in others}
    seen: dict[int, int] = {}
    looked_at_s = time.monotonic()
    while not store.check(["verdict"]):
        if store.check(list(ends.values())):  # all have ended, by one request
            return None
        if time.monotonic() - looked_at_s >= _LOOK_S:
            looked_at_s = time.monotonic()
            for other, end in ends.items():
                if not store.check([end]) and _is_stepping(store, other, step, seen):
                    return other
        time.sleep(_POLL_S)
    return None


def _is_stepping(store: PrefixStore, other: int, step: int, seen: dict[int, int]) -> bool:
    """Return whether the rank's beat shows the step; ``seen`` has its first beat, which may precede a rewind."""
    if not store.check([f"beat/{other}"]):
        return False
    beat = Beat.from_text(store.get(f"beat/{other}"))
    is_fresh = beat.sequence > seen.setdefault(other, beat.sequence)
    return is_fresh and beat.details.get("step") == step and beat.phase in _STEPPING
