"""Rewind after a loss spike to the last good checkpoint, and skip the batches that led to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ..config import TrainerConfig
from ..data.feed import Feed
from ..errors import LossSpikeError
from ..report.progress import Progress
from ..report.recorder import Recorder
from ..steps.step import StepResult, StepRunner
from ..stopwatch import Stopwatch
from ..watch.spike import Spike, SpikeWatch
from .saver import Saver


class Rewinder:
    """Follows the losses, and rewinds training (Chowdhery et al. 2022, section 5.1); ``follow`` is a collective.

    Going back restores weights, optimizer, moving average, loss scale, counters and, by default, the schedule; the data
    continue: nothing since the checkpoint comes again. The checkpoint is then saved anew with the new position, for
    restarts, and later ones are deleted. All mutable state: the watch, the rewinds so far, and whether a
    save waits until suspicious steps are decided.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        saver: Saver,
        feed: Feed,
        steps: StepRunner,
        progress: Progress,
        recorder: Recorder,
        stopwatch: Stopwatch,
        gather_state: Callable[[], dict[str, Any]],
        record_steps: Callable[[], None],
    ) -> None:
        self._config = config.spike
        self._on_nan = config.step.on_nan
        self._saver = saver
        self._feed = feed
        self._steps = steps
        self._progress = progress
        self._recorder = recorder
        self._stopwatch = stopwatch
        self._gather_state = gather_state
        self._record_steps = record_steps
        self._watch = SpikeWatch(config.spike)
        self._rewinds: list[dict[str, int]] = []
        self._save_waits = False

    def follow(self, result: StepResult) -> bool:
        """Look at the step that was just counted; returns whether training was taken back to an earlier one.

        Raises:
            LossSpikeError: on every rank, after too many rewinds, or without a checkpoint if that is the policy.
        """
        if self._config.on_spike == "ignore":
            return False
        spike = self._judge(self._progress.step - 1, result)
        if spike is None:
            return False
        if self._config.on_spike == "note":
            self._recorder.note(spike.problem)
            return False
        return self._rewind(spike)

    def is_save_due(self, scheduled: bool) -> bool:
        """Return whether to save now. Suspicious steps wait: saves during a spike would push good checkpoints out."""
        self._save_waits |= scheduled
        if self._config.on_spike == "rewind" and self._watch.is_undecided:
            return False
        due, self._save_waits = self._save_waits, False
        return due

    def state_dict(self) -> dict[str, Any]:
        """JSON, and the same for any number of ranks."""
        return {"watch": self._watch.state_dict(), "rewinds": list(self._rewinds)}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Continue from a state; states of before have none."""
        if state is None:
            return
        if self._config.on_spike != "ignore":  # then the window would be an old one when it is used again
            self._watch.load_state_dict(state["watch"])
        self._rewinds = list(state["rewinds"])

    def _judge(self, step: int, result: StepResult) -> Spike | None:
        if result.outcome == "empty":
            return None
        if result.outcome != "non-finite":
            return self._watch.add(step, result.loss)
        if self._on_nan != "rewind":
            return None  # skipped without a trace: neither suspicious nor calm
        return self._watch.add_not_finite(step, self._steps.last_problem)

    def _rewind(self, spike: Spike) -> bool:
        config, limit = self._config, spike.first - self._config.margin
        if len(self._rewinds) >= config.max_rewinds:
            before = "; ".join(f"from step {one['from_step']} to {one['to_step']}" for one in self._rewinds)
            raise LossSpikeError(
                f"{spike.problem}; training was rewound {len(self._rewinds)} times already ({before}), and "
                f"spike.max_rewinds={config.max_rewinds}. Lower the rate, set step.clip_norm, or skip more with "
                "spike.skip_batches, and resume"
            )
        with self._stopwatch.phase("rewind"):
            found = self._saver.go_back(limit)
        if found is None:
            lacking = f"{spike.problem}, and there is no checkpoint of step {max(limit, 0)} or before to go back to"
            if config.without_checkpoint == "stop":
                raise LossSpikeError(
                    f"{lacking}; save more often (checkpoint.every_steps, checkpoint.keep_last), or set "
                    "spike.without_checkpoint='continue'"
                )
            self._recorder.note(f"{lacking}; training continues")
            return False
        self._continue_from(*found, spike)
        return True

    def _continue_from(self, step: int, state: Mapping[str, Any], spike: Spike) -> None:
        self._record_steps()
        from_step, updates, epoch = self._progress.step, self._progress.updates, self._progress.epoch
        with self._stopwatch.phase("fetch"):
            drawing = partial(self._stopwatch.enter, "fetch")  # each is progress in the eyes of the watchdog
            epochs_ended = self._feed.skip(self._config.skip_batches, epoch, drawing)
        self._rewinds.append(
            {"from_step": from_step, "to_step": step, "skipped": self._config.skip_batches, "epoch": epoch}
        )
        self._recorder.record(
            "rewind",
            {
                "to_step": step,
                "first_spike_step": spike.first,
                "discarded_steps": from_step - step,
                "skipped_batches": self._config.skip_batches,
                "rewinds": len(self._rewinds),
                "why": spike.problem,
            },
        )
        self._progress.load_state_dict(state["progress"])
        self._saver.judge(self._progress)
        self._progress.epoch = epoch + epochs_ended
        self._progress.rewinds = len(self._rewinds)
        if self._config.schedule == "continue":
            self._progress.updates = updates
        self._steps.load_state_dict(state["steps"])
        if "spikes" in state:
            self._watch.load_state_dict(state["spikes"]["watch"])
        self._watch.calm()
        self._save_waits = False
        self._saver.save_again(step, self._gather_state())
