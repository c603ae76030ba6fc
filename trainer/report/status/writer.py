"""Thread that reports a rank's status: a small file every second, and a timeline on request."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....storage.files import write_whole
from ....storage.observability.process_usage import read_traffic
from ....storage.threads.interruptible import Event, Thread
from ...ranks.mesh import MeshSizes
from ...ranks.world import World
from ...stopwatch import Stopwatch
from ..flops import device_name
from ..memory import measure_gpu, measure_memory
from ..progress import Progress
from .loader_numbers import LoaderNumbers
from .rank_status import FINAL, FOLDER, RankStatus, Silence, State, read_ranks, status_path
from .survey import Survey, survey
from .timelines import TimelineRecorder

# At most this many files a second from all ranks together: a shared file system serves others, too.
_FILES_PER_S = 256.0
# Rank 0 spends at most this share of its time on reading the files of all.
_LOOKING_SHARE = 0.01
_WINDOW_S = 10.0
_WINDOW_STEPS = 3
_KEPT = 120
_MARK_S = 0.1  # at most so often the training loop's thread asks the loader how many samples it handed out
_CLOSING_S = 2.0
_ERROR_CHARACTERS = 2000


def describe_error(error: BaseException) -> str:
    """Its type and its message, in as many characters as a status has room for; Ctrl-C in words."""
    if isinstance(error, KeyboardInterrupt):
        return "KeyboardInterrupt: Ctrl-C, before training could stop in order"
    return f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS]


@dataclass(frozen=True, kw_only=True)
class _StepEnd:
    """The end of a step by perf_counter, and the samples that the loader had handed out by then."""

    at_s: float
    step: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class _Moment:
    """Counts at a time by perf_counter; ``ended`` is the end of a step, one of the last before it."""

    at_s: float
    step: int
    ended: _StepEnd
    seconds: Mapping[str, float]
    traffic: Mapping[str, int]
    metrics: Any


class StatusWriter:
    """Writes this rank's status into ``output_dir/ranks`` while it is open; on rank 0 it also reads those of others.

    Takes part in no collective, and waits for nothing that training waits for: a file system that hangs stops this
    thread alone. What cannot be written is left out; the next one is tried. Mutable state: the moments of the window
    and the newest survey (this thread's); state, error, what stopped training, and the end of a step (set by the
    training loop's thread).
    """

    def __init__(
        self,
        world: World,
        sizes: MeshSizes,
        progress: Progress,
        stopwatch: Stopwatch,
        loader: LoaderNumbers,
        *,
        output_dir: Path,
        every_s: float,
        total_steps: int | None,
    ) -> None:
        self._world, self._progress, self._stopwatch, self._loader = world, progress, stopwatch, loader
        self._sizes = sizes
        self._output_dir = output_dir
        self._total_steps = total_steps
        self.every_s = max(every_s, world.world_size / _FILES_PER_S)
        self.state: State = "starting"
        self.error = ""
        self.stopped_by = ""
        self.resumes_at: int | None = None
        self._began_s = time.time()
        self._sequence = 0
        self._moments: deque[_Moment] = deque()
        self._ended = self._mark()
        self.newest: RankStatus | None = None
        """What this rank wrote last."""
        self._seen: list[RankStatus] = []
        self._silence = Silence()
        self._silent_s: dict[int, float] = {}  # when they were read
        self._looks_at_s = 0.0  # by time.monotonic(): when rank 0 reads all files again
        self.survey: Survey | None = None
        self._timelines = TimelineRecorder(output_dir, world.rank, stopwatch, loader)
        self._closing = Event()
        self._thread = Thread(target=self._run, name="penstock-status")
        self._thread.start()

    @property
    def seen(self) -> list[RankStatus]:
        """All ranks that rank 0 saw last, itself as it was then; any thread may ask."""
        return self._seen

    def begin_steps(self) -> None:
        """Time steps from now on; the training loop's thread calls this before the first, and ``end_step`` after each.

        Rates are those between ends of steps: at both its ends a window has parts of steps, some or most of it.
        """
        self._ended = self._mark()

    def end_step(self) -> None:
        if time.perf_counter() - self._ended.at_s >= _MARK_S or self._progress.step < self._ended.step:
            self._ended = self._mark()

    def _mark(self) -> _StepEnd:
        samples = getattr(self._loader.take(), "samples", 0)
        return _StepEnd(at_s=time.perf_counter(), step=self._progress.step, samples=samples)

    def close(self, error: BaseException | None = None) -> None:
        """Say that the rank is done, was stopped, or why it failed; waits two seconds for a file system that hangs."""
        if error is not None:
            self.state, self.error = "failed", describe_error(error)
        elif self.state != "failed":
            self.state = "stopped" if self.stopped_by else "ended"
        self._closing.set()
        self._thread.join(_CLOSING_S)

    # -- the thread -----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._tidy()
        self._write()
        while not self._closing.wait(min(self.every_s, self._timelines.left_s())):
            self._timelines.turn()
            self._write()
        self._timelines.end()
        self._write()

    def _tidy(self) -> None:
        """Remove what an earlier start on more ranks left here; one rank a node does, as nodes may share no disk."""
        with suppress(OSError):
            (self._output_dir / FOLDER).mkdir(parents=True, exist_ok=True)
        if self._world.local_rank == 0:
            for path in (self._output_dir / FOLDER).glob("rank-*.json"):
                digits = path.stem.removeprefix("rank-")
                if digits.isdecimal() and int(digits) >= self._world.world_size:
                    with suppress(OSError):
                        path.unlink()

    def _write(self) -> None:
        self._sequence += 1
        status = self.newest = self._measure()
        with suppress(OSError):
            write_whole(status_path(self._output_dir, self._world.rank), status.to_text().encode())
        if self._world.is_first:
            self._look_around(status)

    def _look_around(self, own: RankStatus) -> None:
        """Read what the ranks say of themselves, where it is time for that."""
        is_last = self.state in FINAL
        if time.monotonic() >= self._looks_at_s or is_last:
            began_s = time.thread_time()
            self._seen = read_ranks(self._output_dir) or [own]
            self._silent_s = self._silence.note(self._seen)
            self._looks_at_s = time.monotonic() + (time.thread_time() - began_s) / _LOOKING_SHARE
        else:
            self._seen = [own, *(one for one in self._seen if one.rank != own.rank)]
        self.survey = survey(self._seen, time.time(), silent_s=self._silent_s)

    def _measure(self) -> RankStatus:
        now, before = self._look()
        window_s = now.at_s - before.at_s
        seconds = {name: spent - before.seconds.get(name, 0.0) for name, spent in now.seconds.items()}
        recent = None if now.metrics is None or before.metrics is None else now.metrics.since(before.metrics)
        step_s, samples = _step_s(before, now), now.ended.samples - before.ended.samples
        if step_s is None:  # no step has ended in the window
            samples_per_s = recent.samples / window_s if recent is not None and window_s else None
        else:
            samples_per_s = None if recent is None else samples / (now.ended.step - before.ended.step) / step_s
        phase, since_s = self._stopwatch.current
        return RankStatus(
            rank=self._world.rank,
            world_size=self._world.world_size,
            place=self._sizes.describe_place(self._world.rank),
            replica_ranks=self._world.world_size // self._sizes.dp,
            host=socket.gethostname(),
            pid=os.getpid(),
            device=device_name(self._world.device),
            time=time.time(),
            every_s=self.every_s,
            began_s=self._began_s,
            sequence=self._sequence,
            state=self.state,
            error=self.error,
            stopped_by=self.stopped_by,
            resumes_at=self.resumes_at,
            step=now.step,
            total_steps=self._total_steps,
            epoch=self._progress.epoch,
            phase=phase,
            phase_s=time.perf_counter() - since_s,
            doing=self._loader.doing(),
            window_s=window_s,
            steps=max(0, now.step - before.step),
            step_s=step_s,
            samples_per_s=samples_per_s,
            seconds={name: spent for name, spent in seconds.items() if spent > 0},
            memory=measure_memory(self._world.device),
            gpu=measure_gpu(self._world.device),
            traffic=self._rates(now, before),
            loader={} if now.metrics is None else now.metrics.to_dict(),
            recent={} if recent is None else recent.to_dict(),
            loader_levels=sorted(getattr(now.metrics, "levels", ())),
            advice="" if recent is None or not hasattr(recent, "advice") else recent.advice(),
        )

    def _look(self) -> tuple[_Moment, _Moment]:
        """(now, the window's beginning): ten seconds ago, or before the last three steps where these take longer."""
        now = _Moment(
            at_s=time.perf_counter(),
            step=self._progress.step,
            ended=self._ended,
            seconds=self._stopwatch.glance(),
            traffic=read_traffic(),
            metrics=self._loader.take(),
        )
        moments = self._moments
        if moments and now.step < moments[-1].step:
            moments.clear()  # training was rewound
        if len(moments) >= _KEPT:  # of long steps
            self._moments = moments = deque(list(moments)[::2])
        moments.append(now)
        while (
            len(moments) > 1 and now.at_s - moments[1].at_s >= _WINDOW_S and now.step - moments[1].step >= _WINDOW_STEPS
        ):
            moments.popleft()
        return now, moments[0]

    def _rates(self, now: _Moment, before: _Moment) -> dict[str, float]:
        passed_s = now.at_s - before.at_s
        if passed_s <= 0:
            return {}
        return {
            f"{name}_per_s": (value - before.traffic[name]) / passed_s
            for name, value in now.traffic.items()
            if name in before.traffic
        }


def _step_s(before: _Moment, now: _Moment) -> float | None:
    """Seconds of a step, between two ends of steps; one that takes longer counts before it ends. None without two."""
    steps = now.ended.step - before.ended.step
    if steps <= 0:
        return None
    done_s = (now.ended.at_s - before.ended.at_s) / steps
    running_s = (now.at_s - before.ended.at_s) / (now.step - before.ended.step + 1)
    return max(done_s, running_s)
