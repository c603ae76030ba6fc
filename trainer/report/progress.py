"""How far training has come: counters that go into every checkpoint and do not depend on the ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from ..step import StepResult
from ..stopwatch import Stopwatch


@dataclass(kw_only=True)
class Counts:
    """What a run has added up: updates are the steps that changed the weights, ``best`` is the best metric so far.

    After a rewind these are the counts of the checkpoint, but for ``rewinds``.
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
    """Where a run is: the global batches and the epochs that it has consumed, and its counts."""

    step: int = 0
    epoch: int = 0
    evaluations_without_better: int = 0

    def count(self, result: StepResult) -> None:
        """Count a finished step."""
        self.step += 1
        self.samples += result.rows
        self.updates += result.outcome == "updated"
        self.overflows += result.outcome == "overflow"
        self.non_finite += result.outcome == "non-finite"

    def improve(self, metric: float, *, best_is: str | None) -> bool:
        """Keep the metric and its step if it is the best so far ("max" or "min"), and say whether it is."""
        sign = 1 if best_is == "max" else -1
        if math.isnan(metric) or (self.best is not None and sign * metric <= sign * self.best):
            self.evaluations_without_better += 1
            return False
        self.best, self.best_step, self.evaluations_without_better = metric, self.step, 0
        return True

    def counts(self) -> dict[str, Any]:
        """The counts alone, by name."""
        return {entry.name: getattr(self, entry.name) for entry in fields(Counts)}

    def state_dict(self) -> dict[str, Any]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        for entry in fields(self):
            setattr(self, entry.name, state.get(entry.name, entry.default))  # states of older releases lack some


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


class Window:
    """The steps since the last record: sums, and this rank's times."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self.steps = 0
        self._loss_sum = 0.0
        self._count = 0.0
        self._rows = 0
        self._gradient_norm: float | None = None
        self._stopwatch = stopwatch
        self._started_s = stopwatch.total_s
        self._waited_before_s = stopwatch.seconds.get("fetch", 0.0)

    def add(self, result: StepResult) -> None:
        self.steps += 1
        if result.outcome not in ("non-finite", "empty"):
            self._loss_sum += result.loss * result.count
            self._count += result.count
        self._rows += result.rows
        self._gradient_norm = result.gradient_norm

    @property
    def loss(self) -> float:
        """The mean over all samples or tokens of the steps with a finite loss."""
        return self._loss_sum / self._count if self._count else math.nan

    @property
    def seconds_per_step(self) -> float:
        return self._seconds / max(1, self.steps)

    def describe(self) -> dict[str, float | int | str | None]:
        waited_s = self._stopwatch.seconds.get("fetch", 0.0) - self._waited_before_s
        return {
            "loss": self.loss,
            "samples_per_s": self._rows / self._seconds,
            "data_wait_share": waited_s / self._seconds,
            "gradient_norm": self._gradient_norm,
        }

    @property
    def _seconds(self) -> float:
        return max(self._stopwatch.total_s - self._started_s, 1e-9)
