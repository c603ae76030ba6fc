"""Reports of a run on a parameter server: records for the trainer's observers, made of what its coordinator knows."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from ..recipes.recipe import Recipe
from ..report.observers import open_observers
from ..report.progress import Summary
from ..report.records import Values, deliver
from ..report.status.writer import describe_error
from ..server.coordinator import Coordinator
from ..server.services import DataPlan
from ..server.shard import ServerConfig

_SUMS = ("batches", "rows", "loss", "count", "waited_s", "outer_bytes")


@dataclass(frozen=True, kw_only=True)
class View:
    """The state of a run at a moment, as far as it is reported: plain values, from a coordinator near or far."""

    step: int
    consumed: int
    epoch: int
    evaluated: int
    metrics: Mapping[str, float]
    evaluations: Mapping[int, Mapping[str, float]]
    """By epoch."""
    numbers: Mapping[str, Mapping[str, float]]
    """By worker."""

    @classmethod
    def of(cls, coordinator: Coordinator) -> View:
        """Look at a coordinator."""
        return cls(
            step=coordinator.step,
            consumed=coordinator.consumed,
            epoch=coordinator.epoch,
            evaluated=coordinator.evaluated,
            metrics=dict(coordinator.metrics),
            evaluations={epoch: dict(metrics) for epoch, metrics in coordinator.evaluations.items()},
            numbers={name: dict(numbers) for name, numbers in coordinator.numbers.items()},
        )


class Narrator:
    """Makes records of what a run's coordinator knows, for ``metrics.jsonl``, the progress line and the others.

    A step is as many batches as there were workers at the beginning. All mutable state: the observers, the sums and the
    time of the last record, the evaluations that were told, and when a batch last counted.
    """

    def __init__(self, recipe: Recipe, plan: DataPlan) -> None:
        self._recipe, self._plan = recipe, plan
        self._observers = open_observers(recipe.trainer.report, Path(recipe.trainer.output_dir), plan.steps)
        self._started_s = self._last_s = time.monotonic()
        self._sums = dict.fromkeys(_SUMS, 0.0)
        self._before = dict.fromkeys(_SUMS, 0.0)
        self._step = self._consumed = self._evaluated = 0
        self._loss = math.nan
        self._progress: tuple[int, int] = (-1, -1)
        self._progressed_s = time.monotonic()

    def begin(self, *, workers: int, shards: int, server: ServerConfig, resumed: View | None = None) -> None:
        """Tell of a run that begins, or goes on from a checkpoint."""
        if resumed is not None:
            self._step, self._consumed, self._evaluated = resumed.step, resumed.consumed, resumed.evaluated
            self._record("resume", {"world_size": workers})
        parameters = sum(spec.size for spec in server.schema.tensors)
        self._record(
            "start",
            {
                "world_size": workers,
                "num_nodes": 1,
                "restarts": 0,
                "device": self._recipe.trainer.device,
                "host": socket.gethostname(),
                "parameters": parameters,
                "total_steps": self._plan.steps,
                "torch": torch.__version__,
                "mode": self._recipe.trainer.parallel.mode,
                "policy": self._recipe.trainer.server.policy,
                "shards": shards,
                "dtype": self._recipe.trainer.precision.dtype,
            },
        )
        if self._recipe.trainer.checkpoint.keep_best:
            kept = self._recipe.trainer.checkpoint.keep_last
            self.note(f"checkpoint.keep_best keeps nothing on a parameter server: the newest {kept} are kept")

    def note(self, text: str) -> None:
        """Tell a sentence for people to read."""
        self._record("note", {"note": text})

    def record(self, kind: str, values: Values) -> None:
        """Tell of an event at the newest step."""
        self._record(kind, values)

    def look(self, coordinator: Coordinator) -> None:
        """Look at a coordinator, and tell what is new."""
        self.follow(View.of(coordinator))

    def follow(self, view: View, *, is_last: bool = False) -> None:
        """Tell what is new since the last look."""
        sums = {name: sum(one.get(f"{name}_sum", 0.0) for one in view.numbers.values()) for name in _SUMS}
        if sums["batches"] < self._sums["batches"]:  # of a coordinator that has started anew, which begins at zero
            self._before = {name: before - self._sums[name] for name, before in self._before.items()}
        self._sums = sums
        self._consumed = view.consumed
        is_learned = self._recipe.trainer.parallel.mode == "diloco"  # a batch counts long after it is trained on
        progress = int(self._sums["batches"]) if is_learned else view.consumed, view.evaluated
        if progress != self._progress:
            self._progress, self._progressed_s = progress, time.monotonic()
        is_due = view.step - self._step >= self._recipe.trainer.report.every
        is_new = is_last or view.evaluated > self._evaluated
        if (is_due or is_new) and self._sums["batches"] > self._before["batches"]:
            self._tell_steps(view)
        for epoch in range(self._evaluated, view.evaluated):
            if metrics := view.evaluations.get(epoch):
                values = {**metrics, "seconds": metrics.get("seconds", 0.0)}
                self._record("evaluate", values, self._plan.steps_after(epoch))
        self._evaluated = view.evaluated

    def find_stall(self, limit_s: float | None) -> str:
        """Say in words, if no batch counted for so long, that it is so."""
        silent_s = time.monotonic() - self._progressed_s
        if limit_s is None or silent_s <= limit_s:
            return ""
        return (
            f"no batch was trained on for {silent_s:.0f} s (stall_timeout_s={limit_s:g}), and {self._consumed} of "
            f"{self._plan.units} are; look at what the workers wait for, or give a longer stall_timeout_s"
        )

    def finish(self, view: View, *, stopped_by: str, resumes_at: int | None = None) -> Summary:
        """Tell of the end of what ``view`` shows, and sum it up."""
        self.follow(view, is_last=True)
        self._step = view.step
        seconds = time.monotonic() - self._started_s
        samples = view.consumed * self._plan.rows
        summary = Summary(
            updates=view.step,
            samples=samples,
            steps=view.step,
            epochs=view.consumed // self._plan.batches,
            loss=self._loss,
            metrics=dict(view.metrics),
            stopped_early=bool(stopped_by),
            stopped_by_others=False,
            seconds=seconds,
            phase_seconds={},
            wire_bytes=0,
            plain_bytes=0,
        )
        ended = {"stopped_by": stopped_by, "resumes_at": resumes_at} if stopped_by else {}
        values: dict[str, Any] = {
            **view.metrics,
            "loss": self._loss,
            "seconds": seconds,
            "samples": samples,
            "epoch": summary.epochs,
            **ended,
        }
        self._record("end", values)
        return summary

    def close(self, error: BaseException | None = None) -> None:
        """Close the observers; ``error`` is what ended the run."""
        if error is not None:
            self._record("failure", {"error": describe_error(error)})
        observers, self._observers = self._observers, ()
        for observer in observers:
            observer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(error)

    def _tell_steps(self, view: View) -> None:
        now = time.monotonic()
        spent = {name: self._sums[name] - self._before[name] for name in _SUMS}
        seconds = max(now - self._last_s, 1e-9)
        steps = max(1, view.step - self._step)
        self._step, self._last_s, self._before = view.step, now, dict(self._sums)
        self._loss = spent["loss"] / spent["count"] if spent["count"] else math.nan
        workers = max(1, len(view.numbers))
        left = self._plan.steps - view.step
        done_s = (now - self._started_s) / max(1, view.step)
        self._record(
            "train",
            {
                "epoch": view.epoch,
                "steps": steps,
                "seconds": seconds,
                "loss": self._loss,
                "samples_per_s": spent["rows"] / seconds,
                "rate": max((one.get("rate", 0.0) for one in view.numbers.values()), default=0.0),
                "samples": view.consumed * self._plan.rows,
                "updates": view.step,
                "staleness": max((one.get("staleness", 0.0) for one in view.numbers.values()), default=0.0),
                "waited_share": spent["waited_s"] / seconds / workers,
                "eta_s": left * done_s,
                **self._describe_learners(view, spent["waited_s"] / workers),
            },
        )

    def _describe_learners(self, view: View, waited_s: float) -> Mapping[str, float]:
        """Numbers of learners' exchanges, as of those by all-reduce; empty where there are none."""
        norms = [one["outer_norm"] for one in view.numbers.values() if "outer_norm" in one]
        if not norms:
            return {}
        return {"outer_norm": max(norms), "outer_bytes": self._sums["outer_bytes"], "outer_wait_s": waited_s}

    def _record(self, kind: str, values: Values, step: int | None = None) -> None:
        for observer in self._observers:
            deliver(observer, kind, self._step if step is None else step, values)
