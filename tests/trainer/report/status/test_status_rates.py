"""Rates and shares of a rank's status are true at every moment, however long its steps take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.loader.counters import Counters, Levels
from penstock.loader.metrics import LoaderMetrics
from penstock.storage.observability.counts import StoreCounts
from penstock.trainer import World
from penstock.trainer.ranks.mesh import MeshSizes
from penstock.trainer.report.progress import Progress
from penstock.trainer.report.status.loader_numbers import LoaderNumbers
from penstock.trainer.report.status.rank_status import RankStatus
from penstock.trainer.report.status.survey import survey
from penstock.trainer.report.status.writer import StatusWriter
from penstock.trainer.stopwatch import Stopwatch

SAMPLES = 32


class Loader:
    """Hands out batches of 32."""

    def __init__(self) -> None:
        self.counters = Counters()

    def metrics(self) -> Any:
        return LoaderMetrics.read(self.counters, Levels(), StoreCounts())


class Rank:
    """A rank in a world whose clock only moves when it works; a status is measured after every second."""

    def __init__(self, world: World, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now_s)
        self.progress, self.stopwatch, self.loader = Progress(), Stopwatch(), Loader()
        numbers = LoaderNumbers(self.loader)
        options: dict[str, Any] = {"output_dir": folder, "every_s": 1e6, "total_steps": None}
        self.writer = StatusWriter(world, MeshSizes(), self.progress, self.stopwatch, numbers, **options)
        while self.writer.newest is None:  # its thread writes once, and then waits
            time.sleep(0.01)
        self.writer.state = "training"
        self.writer.begin_steps()

    def work(self, phase: str, seconds: float) -> Iterator[RankStatus]:
        until_s = self.now_s + seconds
        with self.stopwatch.phase(phase):
            while int(self.now_s) < int(until_s):
                self.now_s = int(self.now_s) + 1.0
                yield self.writer._measure()
            self.now_s = until_s

    def step(self, **phases: float) -> Iterator[RankStatus]:
        self.loader.counters.add(batches=1, samples=SAMPLES)
        for phase, seconds in phases.items():
            yield from self.work(phase, seconds)
        self.progress.count(SimpleNamespace(rows=SAMPLES, outcome="updated"))  # type: ignore[arg-type]
        self.writer.end_step()


@pytest.fixture
def rank(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rank]:
    made = Rank(world, tmp_path, monkeypatch)
    yield made
    made.writer.close()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("fetch", "forward", "steps"), [(0.05, 0.2, 200), (2.3, 0.1, 30), (0.5, 6.5, 12), (3, 87, 9)])
def test_rates_and_shares_are_true_at_every_moment(rank: Rank, fetch: float, forward: float, steps: int) -> None:
    step_s = fetch + forward
    for number in range(steps):
        for status in rank.step(fetch=fetch, forward=forward):
            if number < 4:
                continue
            assert status.steps_per_s == pytest.approx(1 / step_s, rel=0.02)
            assert status.samples_per_s == pytest.approx(SAMPLES / step_s, rel=0.02)
            shares = status.share("fetch"), status.share("forward")
            assert sum(shares) == pytest.approx(1, abs=0.02)
            assert shares[0] == pytest.approx(fetch / step_s, abs=0.2)
            assert survey([status], status.time).step_s == pytest.approx(step_s, rel=0.02)


def test_a_rank_that_is_stuck_slows_down_and_waits_for_data_all_the_time(rank: Rank) -> None:
    for _ in range(20):
        list(rank.step(fetch=0.1, forward=0.9))
    *_, status = rank.step(fetch=40, forward=0.9)
    assert status.data_wait_share == pytest.approx(1, abs=0.2)
    assert status.steps_per_s < 0.1
    assert status.samples_per_s is not None
    assert status.samples_per_s < 0.1 * SAMPLES


def test_after_a_rewind_and_a_pause_steps_are_timed_anew(rank: Rank) -> None:
    for _ in range(30):
        list(rank.step(forward=1.0))
    rank.progress.step = 10
    list(rank.work("rewind", 100.0))
    rank.writer.begin_steps()
    for _ in range(12):
        found = list(rank.step(forward=2.0))
    assert found[-1].steps_per_s == pytest.approx(0.5, rel=0.02)
