"""The watchdog: each rank reports what it is doing, and when one stalls, fails or dies, all stop and name it.

A rank that waits for another inside a gloo or NCCL collective cannot be interrupted, and its own time-out would name
nobody. So the ranks communicate outside the collectives: a thread of each writes a heartbeat to the process group's
key-value store; rank 0 reads them all and, when one is overdue, writes the verdict, which every rank reads, prints and
obeys.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from ...storage.store_link import is_here, place_of
from ...storage.threads.interruptible import Event, Thread
from ..errors import CheckpointTakenError, StallError, TrainerConfigError, WorldError
from ..ranks.rendezvous import agree_on_start
from ..ranks.world import World
from .heartbeat import VERDICT_AT, Beat, Sighting, State, describe, describe_lost_store, judge, silence_limit_s
from .process_end import end_process, leave_to_launcher, write_report

Activity = Callable[[], Mapping[str, Any]]
"""Returns what a phase is waiting for at the moment."""

Advance = Callable[[], int]
"""Returns how far a phase has come: a number that grows."""

EXIT_STALLED = 75
"""Exit code of a process that the watchdog ended: EX_TEMPFAIL, because another start may well succeed."""

_COLLECTIVE_MARKS = ("gloo", "Gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "ProcessGroup")
_TICKS_PER_TIMEOUT = 25
_TICK_S = (0.02, 2.0)  # least and most
_SUSPENDED_TICKS = 5  # a thread that comes so late was not scheduled, and what it has not seen meanwhile proves nothing
_SUSPENDED_S = 1.0  # at least
_ERROR_CHARACTERS = 2000
_ASKED_AT = 0.2  # of stall_timeout_s: a phase this old is reported with its activity
_GRACE = 0.1  # of stall_timeout_s: time for a rank that is not blocked to stop by an exception of its own


class Watchdog:
    """Watches the ranks from construction to ``close``; construction is a collective.

    The training loop calls ``phase`` whenever it begins something else; that is cheap (no lock, no message). Use the
    watchdog as a context manager around the loop, so that the other ranks learn of an exception before this rank exits.

    All mutable state: this rank's beat, the sightings of others' and the verdict. Two threads: one talks to the store,
    which may block when the store's host is gone; one stands guard, and never blocks.

    Within ``stall_timeout_s`` of a stall, failure or death every rank prints which rank it was, what it was doing and
    for how long, writes this with its own stacks to ``report_folder``, and stops: with StallError if its main thread
    calls ``phase`` or leaves the context, else by ending the process with EXIT_STALLED. ``place`` is this rank's in the
    mesh, with which it is named.
    """

    def __init__(
        self, world: World, stall_timeout_s: float, *, report_folder: str | Path | None = None, place: str = ""
    ) -> None:
        if not stall_timeout_s > 0:
            raise TrainerConfigError(f"stall_timeout_s={stall_timeout_s} must be more than 0")
        if not dist.is_initialized():
            raise WorldError("there is no process group yet; call open_world() first")
        self.stall_timeout_s = stall_timeout_s
        self._world = world
        self._report_folder = None if report_folder is None else Path(report_folder)
        self._tick_s = min(max(stall_timeout_s / _TICKS_PER_TIMEOUT, _TICK_S[0]), _TICK_S[1])
        now_s = time.monotonic()
        self._host, self._place = socket.gethostname(), place
        self._beat = Beat(phase="start", timeout_s=stall_timeout_s)
        self._phase_began_s = now_s
        self._activity: tuple[int, Activity] | None = None  # of the phase with this count
        self._progress: tuple[int, Advance] | None = None  # likewise
        self._progressed = (0, 0, float("-inf"))  # the phase's count, how far it has come, and since when
        self._awake_at_s = now_s
        self._resumed_at_s = float("-inf")
        self._broke_at_s = now_s
        self._store_answered_s = now_s
        watched = range(world.world_size) if world.rank == 0 else (0,)
        self._sightings = {rank: Sighting(beat=None, changed_at_s=now_s) for rank in watched}
        self._excused_at_s = float("-inf")
        self._verdict: str | None = None
        self._stopping = Event()  # the main thread is on its way out with an error
        self._closing = Event()
        self._released = Event()  # nothing is left to guard
        self._wake = Event()
        group_store = _get_default_store()
        self._at = place_of(group_store)
        self._has_store = is_here(group_store)
        self._guard = Thread(target=self._keep_guard, name="penstock-watchdog-guard")
        self._talker = Thread(target=self._talk, name="penstock-watchdog-talk")
        self._guard.start()  # first: what follows may block where the store's host is cut off
        try:
            # A clone has a connection of its own, so that the main thread's use of the store cannot hold ours up.
            connection = group_store.clone()  # type: ignore[attr-defined]  # the stubs of torch lack it
            self._reads_many: bool = connection.has_extended_api()
            self.store = PrefixStore(f"penstock-watchdog/{self._agree_on_name(connection)}", connection)
        except BaseException as exc:
            self._released.set()
            self._guard.join()
            if isinstance(exc, RuntimeError):  # what torch raises for every failure of its stores
                raise StallError(self._sentence_of_lost_store(f"is gone ({type(exc).__name__})")) from exc
            raise
        now_s = time.monotonic()
        self._sightings = {rank: Sighting(beat=None, changed_at_s=now_s) for rank in watched}
        self._talker.start()

    def phase(
        self,
        name: str,
        *,
        timeout_s: float | None = None,
        activity: Activity | None = None,
        progress: Advance | None = None,
        **details: Any,
    ) -> None:
        """Declare what this rank does from now on, such as ``phase("fetch", step=7, shard="train-0003.tar")``.

        ``timeout_s`` replaces ``stall_timeout_s`` for a phase that may take longer (a compilation, a checkpoint of a
        large model). ``activity`` returns more details once the phase has lasted a while: the talking thread then calls
        it for each heartbeat, so it must not block. ``progress`` likewise returns a number; while it grows, neither
        this rank nor one that waits for it is stalled. Called by the training loop's thread only.

        Raises:
            StallError: another rank stalled, failed or died.
        """
        if self._verdict is not None:
            self._stop(self._verdict)
        self._phase_began_s = time.monotonic()
        count = self._beat.count + 1
        self._activity = None if activity is None else (count, activity)
        self._progress = None if progress is None else (count, progress)
        self._beat = Beat(phase=name, details=details, count=count, timeout_s=timeout_s or self.stall_timeout_s)

    def fail(self, error: BaseException) -> None:
        """Report to all ranks that this one stops because of ``error``; they stop too, and name it."""
        state = State.BROKEN_OFF if is_collective_error(error) else State.FAILED
        self._broke_at_s = time.monotonic()
        self._stopping.set()
        self._beat = replace(self._beat, state=state, error=f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])
        self._wake.set()

    def close(self) -> None:
        """Report that this rank is done, and end both threads; closing twice is allowed.

        Rank 0, whose process may host the store, first waits until the others are done too, at most
        ``stall_timeout_s``.
        """
        if self._closing.is_set():
            return
        if self._beat.state is State.RUNNING:
            self._beat = replace(self._beat, state=State.CLOSED)
        self._closing.set()
        self._wake.set()
        # After a verdict nothing is left to report, and a store whose host is gone may block the thread for ever.
        patience = _GRACE if self._verdict is not None else 2.0
        self._talker.join(timeout=patience * self.stall_timeout_s)
        self._released.set()
        self._guard.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; if an error ended the loop, report it to the others, and name the rank that caused it.

        Raises:
            StallError: the error came from a collective because another rank had stalled, failed or died.
        """
        if error is not None and not (
            isinstance(error, (StallError, CheckpointTakenError)) or getattr(error, "is_on_all_ranks", False)
        ):
            self.fail(error)
        broken_off = self._beat.state is State.BROKEN_OFF
        if broken_off:
            deadline_s = time.monotonic() + self.stall_timeout_s
            while self._verdict is None and time.monotonic() < deadline_s:
                time.sleep(_TICK_S[0])
        verdict = self._verdict or "a collective failed, and no rank is known to be the cause"
        self.close()
        if broken_off:
            raise StallError(verdict) from error

    def _stop(self, verdict: str) -> NoReturn:
        self._stopping.set()
        raise StallError(verdict)

    def _agree_on_name(self, connection: Any) -> str:
        """Return a name for this watchdog's keys that no other one uses, the same on every rank."""
        store, timeout_s = PrefixStore("penstock-watchdog", connection), connection.timeout.total_seconds()
        place = self._world.rank, self._world.world_size
        return agree_on_start(store, *place, timeout_s=timeout_s, doing="make a trainer", heard=self._hear)

    def _hear(self) -> None:
        self._store_answered_s = time.monotonic()

    # What follows runs in the talking thread.
    def _talk(self) -> None:
        sequence = 0
        try:
            while self._verdict is None:
                closing = self._closing.is_set()  # read before the beat, so that the last beat says so
                sequence += 1
                self._exchange(sequence)
                if closing:
                    break
                self._wake.wait(self._tick_s)
                self._wake.clear()
            self._take_leave()
        except (RuntimeError, OSError) as exc:
            self._lose_store(exc)

    def _exchange(self, sequence: int) -> None:
        """Send this rank's beat, read the others', and judge: one or two round trips, a few hundred bytes per rank."""
        now_s = time.monotonic()
        self._notice_suspension(now_s)
        beat = replace(self._own_beat(), sequence=sequence, has_store=self._has_store)
        beat = replace(beat, host=self._host, place=self._place)
        if beat.state is State.BROKEN_OFF:
            beat = replace(beat, broken_s=now_s - self._broke_at_s)
        self.store.set(f"beat/{self._world.rank}", beat.to_text())
        if beat.state is State.FAILED:
            own = Sighting(beat=beat, changed_at_s=now_s)
            self._pronounce(judge({self._world.rank: own}, now_s, self.stall_timeout_s))
        elif self.store.check(["verdict"]):
            self._verdict = self.store.get("verdict").decode()
        else:
            self._look_around()
            self._pronounce(self._judge())
        self._store_answered_s = time.monotonic()

    def _look_around(self) -> None:
        """Read the beats of the watched ranks, in one round trip once each has sent its first."""
        ranks = [
            rank for rank, one in self._sightings.items() if one.beat is not None or self.store.check([f"beat/{rank}"])
        ]
        keys = [f"beat/{rank}" for rank in ranks]
        beats = self.store.multi_get(keys) if self._reads_many else [self.store.get(key) for key in keys]
        now_s = time.monotonic()
        for rank, text in zip(ranks, beats, strict=True):
            beat, before = Beat.from_text(text), self._sightings[rank].beat
            self._sightings[rank] = self._sightings[rank].update(beat, now_s)
            moves = before is not None and before.count == beat.count and before.progress < beat.progress
            if moves or beat.timeout_s > self.stall_timeout_s:
                self._excused_at_s = now_s

    def _judge(self) -> str | None:
        """Rank 0 judges all ranks; the others judge only whether rank 0 is still alive."""
        now_s = time.monotonic()
        self._notice_suspension(now_s)
        sightings = {rank: one.forget(self._resumed_at_s) for rank, one in self._sightings.items()}
        if self._world.rank == 0:
            excused_s = max(self._excused_at_s, self._resumed_at_s)
            return judge(sightings, now_s, self.stall_timeout_s, excused_at_s=excused_s)
        limit_s = silence_limit_s(self.stall_timeout_s, broken=self._beat.state is State.BROKEN_OFF)
        if sightings[0].silent_s(now_s) <= limit_s:
            return None
        return judge({**sightings, self._world.rank: self._own_sighting()}, now_s, self.stall_timeout_s)

    def _pronounce(self, sentence: str | None) -> None:
        """Make the sentence the verdict for all ranks, unless another rank was faster."""
        if sentence is not None:
            self._verdict = self.store.compare_set("verdict", "", sentence).decode()

    def _take_leave(self) -> None:
        """Count this rank as gone; rank 0 stays until all are, because its process may host the store.

        After a verdict it does not wait for dead ranks.
        """
        gone = self.store.add("gone", 1)
        if self._world.rank != 0:
            return
        awaited = self._world.world_size
        if self._verdict:
            now_s, limit_s = time.monotonic(), silence_limit_s(self.stall_timeout_s, broken=True)
            awaited -= sum(
                one.silent_s(now_s) > limit_s and (one.beat is None or one.beat.state is not State.CLOSED)
                for one in self._sightings.values()
            )
        patience_s = self.stall_timeout_s * (_GRACE if self._verdict else 1.0)
        deadline_s = time.monotonic() + patience_s
        while gone < awaited and time.monotonic() < deadline_s:
            time.sleep(_TICK_S[0])
            gone = self.store.add("gone", 0)

    def _lose_store(self, error: Exception) -> None:
        first = self._sightings[0]
        if self._closing.is_set() or (first.beat is not None and first.beat.state is State.CLOSED):
            return
        self._verdict = self._sentence_of_lost_store(f"is gone ({type(error).__name__})")

    # What follows runs in the guarding thread.

    def _keep_guard(self) -> None:
        while not self._released.wait(self._tick_s):
            now_s = time.monotonic()
            self._notice_suspension(now_s)
            self._awake_at_s = now_s
            silent_s = now_s - max(self._store_answered_s, self._resumed_at_s)
            if self._verdict is None and not self._closing.is_set() and silent_s > VERDICT_AT * self.stall_timeout_s:
                self._verdict = self._sentence_of_lost_store(f"has not answered for {silent_s:.1f} s")
            if self._verdict is not None and not self._closing.is_set():
                self._carry_out(self._verdict)
                return
        if self._verdict is not None and self._stopping.is_set():
            self._report(self._verdict)  # the main thread was faster than this one

    def _notice_suspension(self, now_s: float) -> None:
        """Begin to watch afresh if this process was not scheduled since the guarding thread last woke; any thread."""
        if now_s - self._awake_at_s > max(_SUSPENDED_S, _SUSPENDED_TICKS * self._tick_s):
            self._awake_at_s = self._resumed_at_s = now_s

    def _sentence_of_lost_store(self, what: str) -> str:
        return describe_lost_store(self._sightings[0], time.monotonic(), what, place=self._at, is_here=self._has_store)

    def _carry_out(self, verdict: str) -> None:
        """Report, let the main thread stop by itself if it can, and otherwise end the process."""
        self._report(verdict)
        if not self._stopping.wait(_GRACE * self.stall_timeout_s):
            leave_to_launcher(f"StallError: {verdict}")
            end_process(EXIT_STALLED)

    def _report(self, verdict: str) -> None:
        rank, doing = self._world.rank, describe(self._own_sighting(), time.monotonic())
        name = f"rank {rank} ({self._place})" if self._place else f"rank {rank}"
        write_report(f"penstock watchdog on {name}: training stops: {verdict}\n", doing, self._report_folder, rank)

    def _own_sighting(self) -> Sighting:
        return Sighting(beat=self._own_beat(), changed_at_s=time.monotonic())

    def _own_beat(self) -> Beat:
        beat, activity = self._beat, self._activity
        now_s = time.monotonic()
        done, moved_at_s = self._read_progress(beat, now_s)
        since_s = now_s - max(self._phase_began_s, self._resumed_at_s, moved_at_s)
        details = beat.details
        if activity is not None and activity[0] == beat.count and since_s > _ASKED_AT * self.stall_timeout_s:
            try:
                details = {**activity[1](), **details}
            except Exception as exc:  # noqa: BLE001 - a loader's error here must not end the watch
                details = {**details, "activity": f"{type(exc).__name__}: {exc}"}
        return replace(beat, details=details, since_s=since_s, progress=done)

    def _read_progress(self, beat: Beat, now_s: float) -> tuple[int, float]:
        """Progress of the phase, and the time of its last change; the main thread may begin another meanwhile."""
        count, value, at_s = self._progressed
        value, at_s = (value, at_s) if count == beat.count else (0, float("-inf"))
        progress = self._progress
        if progress is not None and progress[0] == beat.count and (found := progress[1]()) > value:
            value, at_s = found, now_s
        self._progressed = (beat.count, value, at_s)
        return value, at_s


def is_collective_error(error: BaseException) -> bool:
    """Return whether an error comes from gloo, NCCL, the store or another rank's loader: another rank likely failed."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, dist.DistError) or getattr(cause, "is_consequence", False):
            return True
        if isinstance(cause, RuntimeError) and any(mark in str(cause) for mark in _COLLECTIVE_MARKS):
            return True
        cause = cause.__cause__
    return False
