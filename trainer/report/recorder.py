"""What the observers receive: averages over the steps since the last record, notes, evaluations, the end."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from ..compression.compression import CompressionStats
from ..errors import TrainerError
from ..ranks.world import World
from ..step import StepResult
from ..stopwatch import Stopwatch
from .observers import Observer, ReportConfig, Values, open_observers
from .progress import Progress, Summary, Window

logger = logging.getLogger(__name__)


class Recorder:
    """Collects steps on every rank and passes them to the observers, which only rank 0 has; ``open`` is a collective.

    All mutable state: the window of steps since the last record and the mean loss of the window before.
    """

    def __init__(self, progress: Progress, stopwatch: Stopwatch, total_steps: int | None) -> None:
        self._observers: Sequence[Observer] = ()
        self._progress = progress
        self._stopwatch = stopwatch
        self._total_steps = total_steps
        self._window = Window(stopwatch)
        self.loss = math.nan

    def open(self, given: Sequence[Observer], config: ReportConfig, output_dir: Path, world: World) -> None:
        """Pass records to the given observers and those of the config from now on, and close them; a collective.

        Raises:
            TrainerError: on every rank, if one of the config's observers could not be opened.
        """
        problem: list[TrainerError | None] = [None]
        if world.is_first:
            try:
                self._observers = [*given, *open_observers(config, output_dir, self._total_steps)]
            except TrainerError as exc:
                problem = [exc]
        if world.world_size > 1:
            dist.broadcast_object_list(problem, src=0)
        if problem[0] is not None:
            raise problem[0]

    def begin(self) -> None:
        """Start timing the steps."""
        self._window = Window(self._stopwatch)

    def add(self, result: StepResult) -> None:
        self._window.add(result)

    def record_steps(self, values: Values) -> None:
        """Record the steps since the last record, if there are any, with ``values`` besides their averages."""
        window, self._window = self._window, Window(self._stopwatch)
        if not window.steps:
            return
        self.loss = window.loss
        progress = self._progress
        eta_s = (self._total_steps - progress.step) * window.seconds_per_step if self._total_steps else None
        self.record(
            "train",
            {
                "epoch": progress.epoch,
                **window.describe(),
                "eta_s": eta_s,
                "updates": progress.updates,
                "samples": progress.samples,
                "overflows": progress.overflows,
                "non_finite": progress.non_finite,
                **values,
            },
        )

    def note(self, text: str) -> None:
        """Record a sentence for people to read."""
        self.record("note", {"note": text})

    def record(self, kind: str, values: Mapping[str, float | int | str | None]) -> None:
        failures = []
        for observer in self._observers:
            try:
                observer.record(kind, self._progress.step, values)
            except Exception as exc:  # noqa: BLE001 - whoever looks on may not end the run
                failures.append((observer, exc))
        if failures:
            self._drop(failures)

    def finish(
        self, seconds: float, *, stopped: bool, by_others: bool, metrics: Mapping[str, float], sent: CompressionStats
    ) -> Summary:
        """Record the end of a run of ``seconds`` and sum it up."""
        progress = self._progress
        summary = Summary(
            **progress.counts(),
            steps=progress.step,
            epochs=progress.epoch,
            loss=self.loss,
            metrics=dict(metrics),
            stopped_early=stopped,
            stopped_by_others=by_others,
            seconds=seconds,
            phase_seconds=dict(self._stopwatch.seconds),
            wire_bytes=sent.wire_bytes,
            plain_bytes=sent.plain_bytes,
        )
        self.record(
            "end",
            {
                "loss": summary.loss,
                "seconds": seconds,
                "samples": summary.samples,
                "wire_bytes": summary.wire_bytes,
                "plain_bytes": summary.plain_bytes,
                **metrics,
            },
        )
        return summary

    def close(self) -> None:
        """Close the observers; closing twice is allowed."""
        observers, self._observers = self._observers, ()
        for observer in observers:
            try:
                observer.close()
            except Exception as exc:  # noqa: BLE001 - as above
                logger.warning("%s", _describe(observer, exc, "when it was closed"))

    def _drop(self, failures: Sequence[tuple[Observer, Exception]]) -> None:
        """Go on without the observers that raised, and tell the others; each note makes the list shorter."""
        dropped = [observer for observer, _ in failures]
        self._observers = [one for one in self._observers if not any(one is gone for gone in dropped)]
        for observer, error in failures:
            with suppress(Exception):
                observer.close()
            text = _describe(observer, error, "and is left out from now on")
            logger.warning("%s", text)
            self.note(text)


def _describe(observer: Observer, error: Exception, when: str) -> str:
    return f"observer {type(observer).__name__} raised {type(error).__name__}: {error} {when}"
