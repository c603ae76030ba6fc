"""Traces of a few steps by torch.profiler, for chrome://tracing, Perfetto or TensorBoard, during training."""

from __future__ import annotations

import gzip
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from torch.profiler import ProfilerAction, ProfilerActivity, profile

from ..errors import TrainerConfigError, TrainerError
from ..options import check_choice, check_range
from ..ranks.world import World
from ..stopwatch import Stopwatch

logger = logging.getLogger(__name__)

_LONGEST = 100  # steps: a trace keeps every operation in memory until it is written
_TAIL_BYTES = 64
_RANGE = re.compile(r"(\d+):(\d+)")


@dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """Which steps are traced, into output_dir/profile."""

    steps: tuple[str, ...] = ()
    """Steps to trace, as 10:15: from step 10, counted from 0, up to 15, without it."""

    signal_steps: int = 5
    """Steps that a SIGUSR2 to any rank has traced; 0: the signal is left alone."""

    ranks: Literal["all", "first"] = "all"
    """Which ranks write traces."""

    keep: int = 10
    """Traces that each rank keeps; older ones are deleted."""

    def __post_init__(self) -> None:
        check_choice("profile.ranks", self.ranks, ("all", "first"))
        check_range("profile.keep", self.keep, low=1)
        check_range("profile.signal_steps", self.signal_steps, low=0, high=_LONGEST)
        _ = self.ranges

    @property
    def ranges(self) -> list[range]:
        """The steps of each trace, in order.

        Raises:
            TrainerConfigError: what is no range, is too long, or overlaps another.
        """
        found = []
        for text in self.steps:
            parts = _RANGE.fullmatch(text)
            start, stop = (int(parts[1]), int(parts[2])) if parts else (0, 0)
            if not 0 < stop - start <= _LONGEST:
                raise TrainerConfigError(
                    f"profile.steps={text!r} is no range of 1 to {_LONGEST} steps; give first:stop, as 10:15"
                )
            found.append(range(start, stop))
        found.sort(key=lambda one: one.start)
        for one, following in pairwise(found):
            if following.start < one.stop:
                raise TrainerConfigError(
                    f"profile.steps={self.steps!r}: steps {following.start} to {one.stop - 1} are in two ranges; give "
                    "ranges that do not overlap"
                )
        return found


class Tracer:
    """Traces the steps that are asked for, one trace at a time, each after a step to warm up where there is one.

    Whatever goes wrong ends tracing with a note, and never training. Used by the training loop's thread; mutable
    state: the trace under way, and what is still to be traced.
    """

    def __init__(
        self, config: ProfileConfig, output_dir: str, world: World, stopwatch: Stopwatch, note: Callable[[str], None]
    ) -> None:
        self._config = config
        self._folder = Path(output_dir) / "profile"
        self._world = world
        self._stopwatch = stopwatch
        self._note = note
        self._due = config.ranges if config.ranks == "all" or world.is_first else []
        self._steps: range | None = None
        self._profile: profile | None = None
        self._seen = -1

    def request(self, step: int) -> None:
        """Trace the next steps from ``step`` on, as a signal asks; not while another trace is due in them."""
        wanted = range(step + 1, step + 1 + self._config.signal_steps)  # after one to warm up
        taken = [*self._due, *([self._steps] if self._steps else [])]
        if any(one.start < wanted.stop and wanted.start < one.stop for one in taken):
            self._note("the signal for a trace is ignored: these steps are traced already")
        elif self._config.ranks == "all" or self._world.is_first:
            self._due = sorted([wanted, *self._due], key=lambda one: one.start)

    def begin_step(self, step: int) -> None:
        """Called before each step, and before the fetch for it; more than once does no harm."""
        if step == self._seen or not (self._due or self._steps):
            return
        if step < self._seen:  # training was taken back
            self.finish()
        self._seen = step
        if self._profile is not None and self._steps is not None:
            if step < self._steps.stop:
                self._attempt(self._profile.step)
            else:
                self.finish()
        while self._due and self._due[0].stop <= step:
            self._due.pop(0)  # a resumed run is past it
        if self._profile is None and self._due and step >= self._due[0].start - 1:
            self._begin(step, self._due.pop(0))

    def finish(self) -> None:
        """Write the trace under way, if there is one, even if not all of its steps were made."""
        found, steps, self._profile, self._steps = self._profile, self._steps, None, None
        if found is None or steps is None:
            return
        made = range(steps.start, min(steps.stop, self._seen + 1))
        if not made:  # training ended in the step that warms up
            self._attempt(found.stop)
            return
        with self._stopwatch.phase("profile"):
            self._attempt(lambda: self._write(found, made))

    def close(self) -> None:
        """Stop a trace without writing it, as where training ends with an error; closing twice is allowed."""
        found, self._profile, self._steps = self._profile, None, None
        if found is not None:
            self._attempt(found.stop)

    def _begin(self, step: int, steps: range) -> None:
        traced = range(max(step, steps.start), steps.stop)
        warmup = traced.start - step
        activities = [ProfilerActivity.CPU]
        if self._world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)

        def plan(number: int) -> ProfilerAction:
            return ProfilerAction.WARMUP if number < warmup else ProfilerAction.RECORD

        def start() -> None:
            # acc_events: there is one cycle, and torch 2.11 and 2.12 warn of what the others would lose.
            made = profile(activities=activities, schedule=plan, record_shapes=True, acc_events=True)
            made.start()
            self._profile, self._steps = made, traced

        with self._stopwatch.phase("profile"):
            self._attempt(start)

    def _write(self, found: profile, steps: range) -> None:
        found.stop()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{steps.start:06d}-{steps.stop:06d}-rank-{self._world.rank}.json.gz"
        written = self._folder / f".{name}"
        try:
            _export(found, written)
            written.rename(self._folder / name)
        finally:
            written.unlink(missing_ok=True)
        mine = self._folder.glob(f"steps-*-rank-{self._world.rank}.json.gz")
        for old in sorted(mine, key=lambda path: path.stat().st_mtime_ns)[: -self._config.keep]:
            old.unlink()
        self._note(f"the trace of steps {steps.start} to {steps.stop - 1} is in {self._folder / name}")

    def _attempt(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception as exc:  # noqa: BLE001 - an observer must not end the run
            self._due, self._profile, self._steps = [], None, None
            text = f"tracing stops: {type(exc).__name__}: {exc}"
            self._note(text)
            if not self._world.is_first:  # only rank 0 has observers
                logger.warning("rank %d: %s", self._world.rank, text)


def _export(found: profile, path: Path) -> None:
    """Write a trace, compressed.

    Raises:
        TrainerError: it is not whole; the profiler tells no error where the disk of its file is full.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-trace-") as folder:
        plain = Path(folder) / "trace.json"
        found.export_chrome_trace(str(plain))
        if not _is_whole(plain):
            raise TrainerError(f"a trace could not be written to {folder}; make room there, or set TMPDIR")
        with plain.open("rb") as source, gzip.open(path, "wb") as packed:
            shutil.copyfileobj(source, packed)


def _is_whole(trace: Path) -> bool:
    """Return whether the file exists and ends as JSON does."""
    if not trace.is_file():
        return False
    with trace.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read().rstrip().endswith(b"}")
