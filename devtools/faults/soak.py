"""A soak: one data set, ranks of torchrun, and faults drawn from a seed, for as long as you like.

The weather changes every few seconds: for a while some share of the answers is spoiled, the server is gone, a rank is
suspended, or entries of the cache are damaged. Now and then something deadly happens, and the job is started again,
on another number of ranks, from where all ranks had come. At the end everything that was delivered, by all starts, must
be the plan's, each sample once and with its own content; and no process may have grown.
"""

from __future__ import annotations

import os
import random
import re
import signal
import statistics
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.loader.progress import Advance, show_progress

from .account import Line, account, longest_gap_s
from .bench import Bench
from .disk_cases import delete, flip, harm_some, swap, truncate
from .faults import Answer, BlackHole, Corrupt, Delay, Drip, Fault, Reset, Silence, Truncate
from .network_cases import ABSENT, FORBIDDEN, Weather
from .process_cases import LOADER, workers_of
from .proxy import Request
from .stage import Run, Stage, StageError

GROWTH_BYTES = 64 << 20  # resident, so with what malloc keeps of freed memory, in an arena for each few threads
GROWTH_ALLOCATED_BYTES = 32 << 20
GROWTH_DESCRIPTORS = 16
GROWTH_THREADS = 16
GAP_S = 120.0  # three bad answers to one request take 8, 16 and 32 s, and the pauses between them
WRONG_AGAIN_S = 60.0  # wrong bytes of a shard twice in a row are damage, which ends a job
ENDLESS = 1 << 30
CACHE_LIMIT = "10MB"  # less than the data set, so that the server is asked all the time
_LONG_S = 120.0  # an attempt this long is checked for growth
_PACE_S = 0.05
DEADLY_EVERY_S = (60.0, 300.0)
_SPOILED: tuple[tuple[str, Fault, float], ...] = (
    ("reset", Reset(after_bytes=5000), 0.2),
    ("truncated", Truncate(after_bytes=5000), 0.2),
    ("wrong bytes", Corrupt(after_bytes=3000), 0.05),
    ("late", Delay(seconds=1.5), 0.1),
    ("429", Answer(status=429), 0.2),
    ("500", Answer(status=500), 0.2),
    ("503", Answer(status=503), 0.2),
    ("drip", Drip(bytes_per_s=1000, after_bytes=1000), 0.05),
    ("silence", Silence(after_bytes=1000), 0.05),
    ("black hole", BlackHole(), 0.05),
)
_ONCE: tuple[tuple[str, Fault], ...] = (("one 403", FORBIDDEN), ("one 404", ABSENT))


def parse_seconds(text: str) -> float:
    """Read '90s', '30m', '2h' or seconds."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if found is None or not float(found[1]):
        raise ArgumentTypeError(f"{text!r} is no length of time; give 90s, 30m or 2h")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]]


@dataclass(kw_only=True)
class SoakReport:
    """Report of a soak; ``failures`` is empty where all is well. Growth is that of the longest attempts' processes."""

    seconds: float
    ranks: int
    seed: int
    attempts: int = 0
    epochs: int = 0
    delivered: int = 0
    missing: int = 0
    repeated: int = 0
    wrong: int = 0
    misplaced: int = 0
    replayed: int = 0
    gap_s: float = 0.0
    requests: int = 0
    retries: int = 0
    hedges: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    growth_bytes: int = 0
    growth_allocated_bytes: int = 0
    growth_threads: int = 0
    growth_descriptors: int = 0
    failures: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        faults = ", ".join(f"{count} {name}" for name, count in sorted(self.faults.items()))
        samples = (
            f"{self.delivered:,} samples of {self.epochs} epochs: {self.missing} missing, {self.repeated} repeated"
        )
        growth = (
            f"{self.growth_bytes / 2**20:.1f} MiB, {self.growth_allocated_bytes / 2**20:.1f} MiB given out by malloc, "
            f"{self.growth_threads} threads beside those that fetch"
        )
        lines = [
            f"{self.seconds / 60:.1f} minutes, {self.ranks} ranks, seed {self.seed}: {self.attempts} starts",
            f"  {samples}, {self.wrong} wrong;",
            f"  {self.misplaced} batches not as planned, {self.replayed:,} replayed after a kill",
            f"  {self.requests:,} requests, {self.retries:,} tried again; longest gap {self.gap_s:.1f} s",
            f"  growth of a process: {growth}, {self.growth_descriptors} descriptors",
            f"  faults: {faults}",
        ]
        return "\n".join([*lines, *(f"  FAILED: {failure}" for failure in self.failures)])


class Soak:
    """Plays weather until the time is over.

    Mutable state: the source of chance, whether ranks now have processes for their loaders, how often each fault was
    made, and when each shard's bytes were last wrong.
    """

    def __init__(
        self,
        bench: Bench,
        *,
        ranks: int,
        seconds: float,
        seed: int,
        deadly_every_s: tuple[float, float] = DEADLY_EVERY_S,
    ) -> None:
        self._bench = bench
        self._ranks = ranks
        self._seconds = seconds
        self._seed = seed
        self._deadly_every_s = deadly_every_s
        self._draw = random.Random(seed)
        self._is_beside = False
        self._made: Counter[str] = Counter()
        self._wrong_at: dict[str, float] = {}
        self._failures: list[str] = []

    def run(self, *, quiet: bool = False) -> SoakReport:
        """Play, and account for all that was delivered."""
        began = time.monotonic()
        with (
            self._bench.stage("soak") as stage,
            show_progress("soak", int(self._seconds), unit="s", enabled=not quiet) as advance,
        ):
            (stage.folder / "cache").mkdir()
            try:
                self._play(stage, began, advance)
            except StageError as exc:  # a start that never began: what came before it counts
                self._failures.append(f"start {len(stage.runs)}: {exc}")
            self._end_well(stage)
            return self._report(stage, time.monotonic() - began)

    def _play(self, stage: Stage, began: float, advance: Advance) -> None:
        shown_s = 0
        while (left_s := self._seconds - (time.monotonic() - began)) > 0:
            self._start(stage)
            for _ in self._live(stage, min(left_s, self._draw.uniform(*self._deadly_every_s))):
                now = int(time.monotonic() - began)
                advance(now - shown_s)
                shown_s = now
            if time.monotonic() - began < self._seconds:
                self._end_deadly(stage)

    def _start(self, stage: Stage) -> None:
        """Start, the first time on all ranks, and later on some of them, with or without the cache."""
        ranks = self._ranks if not stage.runs else self._draw.randint(1, self._ranks)
        cached = {"cache_dir": str(stage.folder / "cache"), "cache_limit": CACHE_LIMIT}
        loader = cached if self._draw.random() < 0.5 else {}
        self._is_beside = self._draw.random() < 0.5
        if self._is_beside:
            loader = {**loader, "place": "process"}
        stage.proxy.choose(None)
        stage.proxy.resume()
        stage.start(ranks, torchrun=True, meets=True, until_epoch=ENDLESS, pace_s=_PACE_S, loader=loader)
        stage.run.wait_for(5)

    def _live(self, stage: Stage, seconds: float) -> Iterator[None]:
        """Survivable weather; ends early if the job has ended, which is a failure."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._change_weather(stage)(min(until - time.monotonic(), self._draw.uniform(3.0, 12.0)))
            stage.proxy.choose(None)
            stage.proxy.resume()
            yield
            if stage.run.process.poll() is not None:
                self._failures.append(f"start {len(stage.runs)} ended by itself: {_why(stage.run)}")
                return

    def _change_weather(self, stage: Stage) -> Callable[[float], None]:
        kind = self._draw.choices(["spoiled", "once", "gone", "suspended", "cache", "calm"], [8, 1, 1, 1, 2, 1])[0]
        play = {
            "spoiled": self._spoil,
            "once": self._spoil_once,
            "gone": self._take_away,
            "suspended": self._suspend,
            "cache": self._harm_cache,
            "calm": self._be_calm,
        }[kind]
        return lambda seconds: play(stage, max(0.1, seconds))

    def _spoil(self, stage: Stage, seconds: float) -> None:
        chosen = self._draw.sample(_SPOILED, self._draw.randint(1, 3))
        for name, _, _ in chosen:
            self._made[name] += 1
        share = statistics.fmean(share for _, _, share in chosen)
        weather = Weather(*(fault for _, fault, _ in chosen), share=share, seed=self._draw.randrange(1 << 30))
        stage.proxy.choose(lambda request: self._survivable(weather(request), request, time.monotonic()))
        time.sleep(seconds)

    def _survivable(self, fault: Fault | None, request: Request, now: float) -> Fault | None:
        shard = request.path.partition("?")[0]
        if isinstance(fault, Corrupt):
            if now - self._wrong_at.get(shard, float("-inf")) < WRONG_AGAIN_S:
                return None
            self._wrong_at[shard] = now
        return fault

    def _spoil_once(self, stage: Stage, seconds: float) -> None:
        name, fault = self._draw.choice(_ONCE)
        self._made[name] += 1
        stage.proxy.choose(Weather(fault, times=1))
        time.sleep(seconds)

    def _take_away(self, stage: Stage, seconds: float) -> None:
        self._made["server gone"] += 1
        stage.proxy.pause()
        time.sleep(seconds)

    def _suspend(self, stage: Stage, seconds: float) -> None:
        self._made["rank suspended"] += 1
        pid = stage.run.pid_of(self._draw.randrange(stage.run.ranks))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            time.sleep(min(seconds, 4.0))
            os.kill(pid, signal.SIGCONT)

    def _harm_cache(self, stage: Stage, seconds: float) -> None:
        self._made["cache harmed"] += 1
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            harm_some(stage.folder / "cache", self._draw, (flip, truncate, delete, swap))
            time.sleep(0.1)

    def _be_calm(self, stage: Stage, seconds: float) -> None:
        time.sleep(seconds)

    def _end_deadly(self, stage: Stage) -> None:
        """Something that no job survives."""
        run = stage.run
        deadly = ["rank killed", "rank terminated", "launcher terminated", "all killed", "forbidden"]
        name = self._draw.choice([*deadly, *(["loader's process killed"] if self._is_beside else [])])
        self._made[name] += 1
        rank = self._draw.randrange(run.ranks)
        with suppress(ProcessLookupError):
            if name == "rank killed":
                os.kill(run.pid_of(rank), signal.SIGKILL)
            elif name == "loader's process killed":
                for pid in workers_of(run.pid_of(rank), LOADER):
                    os.kill(pid, signal.SIGKILL)
            elif name == "rank terminated":
                os.kill(run.pid_of(rank), signal.SIGTERM)
            elif name == "launcher terminated":
                run.process.terminate()
            elif name == "forbidden":
                stage.proxy.choose(Weather(FORBIDDEN))
            else:
                run.kill()
        # With the whole data set in the cache no request is sent, and a refusal goes unseen.
        if not run.join(60) and name != "forbidden":
            self._failures.append(f"start {len(stage.runs)} did not end within 60 s of: {name}")

    def _end_well(self, stage: Stage) -> None:
        """Ask the newest attempt to stop after a batch, and see that it ends well."""
        stage.proxy.choose(None)
        stage.proxy.resume()
        if stage.run.process.poll() is not None:
            return
        Path(stage.folder, "stop").touch()
        if not stage.run.join(90):
            self._failures.append("the last start did not stop within 90 s of being asked to")
        left = [line for rank in range(stage.run.ranks) for line in stage.run.lines(rank) if line["kind"] == "end"]
        for line in left:
            for what in ("own_threads", "descriptors"):
                if line["left"][what] > 0:
                    self._failures.append(f"{line['left'][what]} {what} were left after close()")

    def _report(self, stage: Stage, seconds: float) -> SoakReport:
        attempts = stage.attempts()
        found = account(attempts, self._bench.plan(stage.url))
        report = SoakReport(seconds=round(seconds, 1), ranks=self._ranks, seed=self._seed, attempts=len(attempts))
        for name in ("delivered", "missing", "repeated", "wrong", "misplaced", "replayed"):
            setattr(report, name, getattr(found, name))
        report.epochs = attempts[-1].reached[0] + 1
        report.gap_s = longest_gap_s(attempts)
        report.faults = dict(self._made)
        for attempt in attempts:
            for lines in attempt.ranks:
                readings = [line for line in lines if line["kind"] == "process"]
                for name in ("requests", "retries", "hedges"):
                    count = readings[-1]["counts"].get(name, 0) if readings else 0
                    setattr(report, name, getattr(report, name) + count)
                _note_growth(readings, report)
        report.failures = self._failures + list(_list_failures(report))
        return report


def _note_growth(readings: list[Line], report: SoakReport) -> None:
    """Note how much a process grew from the first third of its life, after a warm-up, to the last; medians."""
    if not readings or readings[-1]["t"] - readings[0]["t"] < _LONG_S:
        return
    readings = readings[len(readings) // 10 :]
    third = len(readings) // 3
    for name, where in (
        ("rss", "growth_bytes"),
        ("allocated", "growth_allocated_bytes"),
        ("threads", "growth_threads"),
        ("descriptors", "growth_descriptors"),
    ):
        first, last = (statistics.median(line[name] for line in part) for part in (readings[:third], readings[-third:]))
        setattr(report, where, max(getattr(report, where), int(last - first)))


def _list_failures(report: SoakReport) -> Iterator[str]:
    for name in ("missing", "repeated", "wrong", "misplaced"):
        if count := getattr(report, name):
            yield f"{count} {'batches' if name == 'misplaced' else 'samples'} {name}"
    if report.gap_s > GAP_S:
        yield f"{report.gap_s:.0f} s without a batch; the limit is {GAP_S:.0f} s"
    for name, limit in (
        ("growth_bytes", GROWTH_BYTES),
        ("growth_allocated_bytes", GROWTH_ALLOCATED_BYTES),
        ("growth_threads", GROWTH_THREADS),
        ("growth_descriptors", GROWTH_DESCRIPTORS),
    ):
        if getattr(report, name) > limit:
            yield f"{name} is {getattr(report, name):,}; the limit is {limit:,}"


def _why(run: Run) -> str:
    errors = [line for rank in range(run.ranks) for line in run.lines(rank) if line["kind"] == "error"]
    return f"{errors[0]['error']}: {errors[0]['message'][:300]}" if errors else run.tail()[-500:]
