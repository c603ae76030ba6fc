"""Progress of training: counters that go into every checkpoint and do not depend on the ranks."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import torch

from ..steps.step import StepResult
from ..stopwatch import Stopwatch
from .flops import Compute

_KEPT_ENDS = 1024


@dataclass(kw_only=True)
class Counts:
    """Totals of a run: updates are the steps that changed the weights, ``best`` is the best metric so far.

    After a rewind these are the counts of the checkpoint, except ``rewinds``.
    """

    updates: int = 0
    samples: int = 0
    overflows: int = 0
    non_finite: int = 0
    rewinds: int = 0
    best: float | None = None
    best_step: int | None = None


@dataclass(kw_only=True)
class Progress(Counts):
    """The place of a run: the global batches and the epochs that it has consumed, its counts, and what is due."""

    step: int = 0
    epoch: int = 0
    evaluations_without_better: int = 0
    evaluation_is_due: bool = False
    """A stop after this step, or after its epoch, left the evaluation undone that is due there."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Those of the last evaluation."""
    judged_by: str | None = None
    """The metric that ``best`` is of."""
    good_end: str | None = None
    """Which end of it is good: "max" or "min"."""
    leaders: list[float] = field(default_factory=list)
    """The best metrics so far, of as many checkpoints as are kept for theirs."""

    def count(self, result: StepResult) -> None:
        """Count a finished step."""
        self.step += 1
        self.samples += result.rows
        self.updates += result.outcome == "updated"
        self.overflows += result.outcome == "overflow"
        self.non_finite += result.outcome == "non-finite"

    def judge_by(self, metric: str, good_end: str | None) -> str | None:
        """Judge by a metric from now on; forget the best of another one, and return a note of it."""
        before, self.judged_by, self.good_end = (self.judged_by, self.good_end), metric, good_end
        is_known = before != (None, None)  # states of older releases lack it
        if not is_known or before == (metric, good_end) or (self.best is None and not self.evaluations_without_better):
            return None
        best = "" if self.best is None else f", {self.best} of step {self.best_step},"
        self.best, self.best_step, self.evaluations_without_better, self.leaders = None, None, 0, []
        return (
            f"evaluate.best is now {_in_words(metric, good_end)}: the best by {_in_words(*before)}{best} is forgotten, "
            "and patience starts again"
        )

    def improve(self, metric: float) -> bool:
        """Keep the metric and its step if it is the best so far, and say whether it is."""
        if math.isnan(metric) or (self.best is not None and not self._is_better(metric, self.best)):
            self.evaluations_without_better += 1
            return False
        self.best, self.best_step, self.evaluations_without_better = metric, self.step, 0
        return True

    def is_among_best(self, metric: float, most: int) -> bool:
        """Keep the metric if it is one of the ``most`` best so far, and say whether it is; of equals the first are."""
        better = [one for one in self.leaders if not self._is_better(metric, one)]
        if math.isnan(metric) or len(better) >= most:
            return False
        self.leaders = sorted([*self.leaders, metric], reverse=self.good_end == "max")[:most]
        return True

    def _is_better(self, metric: float, than: float) -> bool:
        return metric > than if self.good_end == "max" else metric < than

    def counts(self) -> dict[str, Any]:
        """Collect the counts alone, by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Counts)}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = Progress()
        for entry in fields(self):  # states of older releases lack some
            setattr(self, entry.name, state.get(entry.name, getattr(before, entry.name)))
        if "leaders" not in state and self.best is not None:
            self.leaders = [self.best]


@dataclass(kw_only=True)
class Summary(Counts):
    """The result of a call of ``train``; ``metrics`` are those of the last evaluation.

    ``stopped_by_others`` is True where only another node got the signal that asked to stop. That node leaves; for the
    run to go on without it, the process should end with EXIT_STALLED, so that torchrun starts it again.
    ``wire_bytes`` are the bytes of gradients that this rank sent, ``plain_bytes`` what they would be uncompressed.
    """

    steps: int
    epochs: int
    loss: float
    metrics: Mapping[str, float]
    stopped_early: bool
    stopped_by_others: bool
    seconds: float
    phase_seconds: Mapping[str, float]
    wire_bytes: int
    plain_bytes: int


class Pace:
    """Seconds of a step over the newer half of the steps since training began, to estimate the remaining time.

    Half a run has evaluations and saves about as often as its rest, which the steps of one record have not; and the
    slow first steps are soon not among them.
    """

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque([(0, 0.0)])  # steps and seconds so far, of the records

    def add(self, steps: int, seconds: float) -> None:
        """Count the steps of one record, and the seconds since the one before."""
        ends = self._ends
        ends.append((ends[-1][0] + steps, ends[-1][1] + seconds))
        while len(ends) > 2 and 2 * ends[1][0] <= ends[-1][0]:
            ends.popleft()
        if len(ends) > _KEPT_ENDS:
            self._ends = deque([*list(ends)[:-1:2], ends[-1]])

    @property
    def seconds_per_step(self) -> float:
        (first, since_s), (last, until_s) = self._ends[0], self._ends[-1]
        return (until_s - since_s) / max(1, last - first)


class Window:
    """The steps since the last record: sums, and this rank's times. Results on a device are read late."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.steps = 0
        self._loss_sum: float | torch.Tensor = 0.0
        self._count = 0.0
        self._rows = 0
        self._norm: float | torch.Tensor | None = None
        self._largest_norm: float | torch.Tensor | None = None
        self._stopwatch = stopwatch
        self._started_s = stopwatch.total_s
        self._seconds_before = dict(stopwatch.read())

    def add(self, result: StepResult) -> None:
        self.steps += 1
        if result.outcome not in ("non-finite", "empty"):
            self._loss_sum += result.loss * result.count
            self._count += result.count
        self._rows += result.rows
        self._norm = norm = result.gradient_norm
        if norm is not None and result.outcome == "updated":
            largest = self._largest_norm
            self._largest_norm = norm if largest is None else _larger(largest, norm)

    @property
    def loss(self) -> float:
        """Compute the mean over all samples or tokens of the steps with a finite loss."""
        return float(self._loss_sum) / self._count if self._count else math.nan

    @property
    def seconds(self) -> float:
        """Measure the seconds since the last record."""
        return max(self._stopwatch.total_s - self._started_s, 1e-9)

    def describe(self, compute: Compute | None = None) -> dict[str, float | int | str | None]:
        """Make the record's values; ``compute`` adds what the devices computed. Waits for the device where it must."""
        phases = self._phase_seconds()
        wall_s = self.seconds
        found: dict[str, float | int | str | None] = {
            "steps": self.steps,
            "seconds": wall_s,
            "loss": self.loss,
            "samples_per_s": self._rows / wall_s,
            "data_wait_share": phases.get("fetch", 0.0) / wall_s,
            "gradient_norm": None if self._norm is None else float(self._norm),
        }
        if self._largest_norm is not None:
            found["gradient_norm_max"] = float(self._largest_norm)
        if self._count > self._rows:  # the loss counts something smaller than samples
            found["tokens_per_s"] = self._count / wall_s
        if compute is not None:
            found |= compute.describe(rows=self._rows, count=self._count, seconds=wall_s)
        return found | {f"seconds_{name.replace(' ', '_')}": spent for name, spent in phases.items()}

    def _phase_seconds(self) -> dict[str, float]:
        now = self._stopwatch.read()
        return {name: spent - self._seconds_before.get(name, 0.0) for name, spent in now.items()}


def _in_words(metric: str | None, good_end: str | None) -> str:
    return f"{metric!r} ({'high' if good_end == 'max' else 'low'} is good)"


def _larger(one: float | torch.Tensor, other: float | torch.Tensor) -> float | torch.Tensor:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.maximum(one, other)
    return max(float(one), float(other))
