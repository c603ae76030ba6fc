"""Evaluate a run when it is due, and act on the metrics: record them, keep the best checkpoint, ask for a stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..config import TrainerConfig
from ..evaluation.evaluate import Evaluation, evaluate
from ..parallel.model import ParallelModel
from ..parallel.passes import Passes
from ..report.progress import Progress
from ..report.recorder import Recorder
from ..reproducibility import deterministic_kernels, seed_step
from ..stopwatch import Stopwatch
from .guard import Guard
from .saver import Saver

_FEW_EVALUATIONS, _SHORT_S, _MUCH = 3, 3.0, 0.25


class Evaluator:
    """Evaluates one run. That an evaluation is due, and the metrics of the last one, are part of the run's progress."""

    def __init__(
        self,
        config: TrainerConfig,
        evaluation: Evaluation | None,
        parallel: ParallelModel,
        passes: Passes,
        *,
        saver: Saver,
        guard: Guard,
        progress: Progress,
        recorder: Recorder,
        stopwatch: Stopwatch,
        gather_state: Callable[[], dict[str, Any]],
    ) -> None:
        self._config = config
        self._evaluation = evaluation
        self._parallel = parallel
        self._passes = passes
        self._saver = saver
        self._guard = guard
        self._progress = progress
        self._recorder = recorder
        self._stopwatch = stopwatch
        self._gather_state = gather_state
        self._has_noted_none = self._has_noted_share = False
        self._evaluations = 0

    def evaluate(self) -> dict[str, float] | None:
        """The metrics over all evaluation data, or None without any or when a signal asks to stop; a collective.

        Raises:
            TrainerError: an observer calls this, and there are other ranks.
        """
        world, step = self._parallel.world, self._progress.step
        if world.world_size > 1:
            self._recorder.refuse("evaluate")
        if self._evaluation is None:
            return None
        with self._guard.watching(), self._saver.evaluated(), deterministic_kernels(self._config.deterministic):
            seed_step(self._config.seed, step, self._parallel.mesh.gradient_rank, world.device, "evaluation")
            found = evaluate(
                self._parallel,
                self._evaluation,
                passes=self._passes,
                phase=self._stopwatch.phase,
                stop_requested=self._guard.is_stop_requested,
            )
        if found is not None:
            self._progress.metrics, self._progress.evaluation_is_due = found, False
            if not found and not self._has_noted_none:
                self._has_noted_none = True
                self._recorder.note(
                    "the evaluation measured nothing: no rank had a batch, or the metrics function returned none; "
                    "if all samples fill no batch, give its loader last_batch='partial' or 'pad'"
                )
            self._recorder.record("evaluate", found if self._saver.ema is None else {"weights": "ema", **found})
            self._saver.keep_best(found, self._progress, self._gather_state)
            self._evaluations += 1
            self._tell_share()
        return found

    def _tell_share(self) -> None:
        """Note once that evaluations take much of the run's time."""
        seconds = self._stopwatch.seconds
        whole_s = sum(seconds.values())
        spent_s = seconds.get("evaluate", 0.0) + seconds.get("evaluation fetch", 0.0)
        enough = self._evaluations >= _FEW_EVALUATIONS and spent_s > _SHORT_S
        if self._has_noted_share or not enough or spent_s < _MUCH * whole_s:
            return
        self._has_noted_share = True
        every = self._config.evaluate.every
        now = "now after each epoch" if every is None else f"now {every}"
        self._recorder.note(
            f"evaluation takes {spent_s / whole_s:.0%} of the time so far ({self._evaluations} evaluations of "
            f"{spent_s / self._evaluations:.1f} s): evaluate less often with evaluate.every=STEPS ({now}), or on fewer "
            "samples"
        )

    def end_step(self, *, stopped: bool) -> bool:
        """Evaluate if that is due after this step; returns whether a signal asks to stop.

        What a stop leaves undone stays due, and a resumed run begins with it.
        """
        every = self._config.evaluate.every
        if self._evaluation is not None and every is not None and self._progress.step % every == 0:
            self._progress.evaluation_is_due = True
            return stopped or self.evaluate() is None
        return stopped

    def end_epoch(self, *, stopped: bool = False) -> bool:
        """Evaluate if that is due after each epoch; returns whether a signal asks to stop, as ``end_step`` does."""
        if self._evaluation is None or self._config.evaluate.every is not None:
            return stopped
        self._progress.evaluation_is_due = True
        return stopped or self.evaluate() is None

    def make_up(self) -> bool:
        """Make the evaluation that a stop left undone; returns whether a signal asks to stop again."""
        return self._progress.evaluation_is_due and self._evaluation is not None and self.evaluate() is None
