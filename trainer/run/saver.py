"""One model on all ranks while it is evaluated or saved, and its checkpoints over a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from ...storage.suggestions import did_you_mean, list_some
from ..checkpoint.checkpointer import Checkpointer
from ..checkpoint.export import export_safetensors
from ..checkpoint.settings import copy_settings
from ..compression.compression import Compression
from ..config import TrainerConfig
from ..errors import NonFiniteLossError, TrainerConfigError
from ..parallel.averaging import PeriodicAverager
from ..parallel.ema import WeightEma
from ..parallel.model import ParallelModel
from ..report.progress import Progress
from ..report.recorder import Recorder
from ..steps.consistency import refuse_unlike_weights
from ..steps.finite import find_infinite_constants, refuse_weights
from ..stopwatch import Stopwatch
from ..weights.model_config import keep_model_config
from ..weights.warm_start import load_weights
from .unsaved import UnsavedBuffers

if TYPE_CHECKING:
    from ..diloco.learners import Learners

_DILOCO, _LEARNERS = "diloco", "learners"
_NAMED = 3


class Saver:
    """Owns checkpointer, moving average, and what brings ranks together that train apart, each where asked for.

    Its methods are collectives. ``checkpointer`` is None in a run that keeps no checkpoints. ``settle`` waits for what
    is not yet known of the last step.
    """

    def __init__(
        self,
        config: TrainerConfig,
        parallel: ParallelModel,
        optimizer: Optimizer,
        compression: Compression,
        *,
        recorder: Recorder,
        stopwatch: Stopwatch,
        settle: Callable[[], None],
    ) -> None:
        self._config = config
        self._parallel = parallel
        self._optimizer = optimizer
        self._compression = compression
        self._recorder = recorder
        self._stopwatch = stopwatch
        self._settle = settle
        self._given = copy_settings(optimizer)
        self._saved: tuple[int, Any, float | None] | None = None  # the last save's step, progress and metric
        self._unsaved = UnsavedBuffers(parallel.inner)
        self._constants: frozenset[str] = frozenset()
        self.ema = None if config.ema.decay is None else WeightEma(parallel.inner, config.ema)
        self.averager: PeriodicAverager | None = None
        self.learners: Learners | None = None
        self.checkpointer: Checkpointer | None = None
        world = parallel.world
        if config.averaging is not None:
            self.averager = PeriodicAverager(
                parallel.inner,
                optimizer,
                config.averaging,
                world,
                also=tuple if self.ema is None else self.ema.parts,
                count_sum=compression.wire.add_ring,
            )
        if config.parallel.mode == "diloco":
            from ..diloco.learners import Learners

            self.learners = Learners(parallel, optimizer, self.ema, compression.wire)
        if config.keeps_checkpoints:
            given = config.checkpoint
            self._folder = given.folder if given.is_remote else str(Path(config.output_dir) / given.folder)
            resolved = replace(given, folder=self._folder, best=config.best_end)
            try:
                stopwatch.enter("checkpoint lock")
                self.checkpointer = Checkpointer(resolved, world, config.evaluate.best, parallel.stages)
                stopwatch.enter("construction")
                self.checkpointer.entered = stopwatch.enter
                more_bytes = sum(one.nbytes for one in (self.ema, self.learners) if one is not None)
                self.checkpointer.check_room(parallel.inner, more_bytes)
            except BaseException:
                self.close()
                raise

    @property
    def groups_then(self) -> tuple[tuple[int, ...], ...] | None:
        """For each group of the optimizer, those of the checkpoint loaded last that have its parameters."""
        return None if self.checkpointer is None else self.checkpointer.groups_then

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Give all ranks one model within this, so that the evaluated model is the saved one; training is not affected.

        Raises:
            NonFiniteLossError: on every rank, if the last step's gradients were not finite.
            TrainerError: on every rank, if their weights differ.
        """
        self._settle()
        with ExitStack() as stack:
            if self.averager is not None:
                with self._stopwatch.phase("average"):
                    stack.enter_context(self.averager.averaged())
            elif self._parallel.exchanges and not self._parallel.is_sharded:
                refuse_unlike_weights(self._parallel.inner, self._parallel.mesh)
            if self.learners is not None:
                with self._stopwatch.phase("average"):
                    stack.enter_context(self.learners.averaged())
            self._parallel.agree_on_buffers()
            yield

    @contextmanager
    def evaluated(self) -> Iterator[None]:
        """As ``agreed``; where there is a moving average of the weights, it is the model's weights."""
        with self.agreed(), nullcontext() if self.ema is None else self.ema.swapped():
            yield

    def end_step(self, step: int, *, updated: bool, own_count: float, count: float) -> None:
        """Bring ranks together as is due after this step; then the moving average follows weights that changed.

        This rank's learner counted ``own_count`` of the step's ``count`` of samples or tokens.
        """
        if self.averager is not None:
            with self._stopwatch.phase("average"):
                self.averager.average_if_due(step)
        if self.learners is not None:
            with self._stopwatch.phase("average"):
                self.learners.end_step(step, own_count=own_count, count=count)
        if self.ema is not None and updated:
            with self._stopwatch.phase("ema"):
                self.ema.update()
        if self.checkpointer is not None and self._parallel.world.is_first:
            self._unsaved.end_step(step)

    def finish_exchange(self) -> None:
        """Wait for what learners exchange, so that the state of the run counts it."""
        if self.learners is not None:
            self.learners.settle()

    def describe(self) -> dict[str, float]:
        """Numbers of what learners exchanged, for the record of steps; empty where there are none."""
        return {} if self.learners is None else self.learners.describe()

    def save(
        self, step: int, state: dict[str, Any], *, blocking: bool, metric: float | None = None, again: bool = False
    ) -> None:
        """Save the run after ``step``, where checkpoints are kept; ``state`` is the same on every rank.

        The step that was saved or loaded last is saved only with a metric, or ``again``.

        Raises:
            NonFiniteLossError: on every rank, where a weight is not finite; nothing is saved then. A save that is not
                ``blocking`` leaves a note instead where training goes back after such a loss.
            CheckpointError: the save failed.
        """
        if self.checkpointer is None:
            return
        changed = self._unsaved.describe_changed(step)
        if changed is not None:
            self._recorder.note(changed)
        state = state | {"optimizer": type(self._optimizer).__name__}
        more: dict[str, Any] = {}
        if self.learners is not None:
            self._parallel.agree_on_buffers()
            more = {_DILOCO: self.learners.shared_tensors(), self._own_part: self.learners.copy_own()}
            state = state | {_DILOCO: self.learners.state_dict()}
        with self.agreed():
            averages = None if self.ema is None else self.ema.named()
            try:
                refuse_weights(self._parallel.inner, step, self._parallel.world, averages, self._constants)
            except NonFiniteLossError as exc:
                if blocking or self._config.step.on_nan != "rewind":
                    raise
                self._recorder.note(f"{exc}")  # the next loss will not be finite either, and training goes back then
                return
            with self._stopwatch.phase("checkpoint"):
                is_new = self.checkpointer.save(
                    step,
                    self._parallel.inner,
                    self._optimizer,
                    state if self.ema is None else state | {"ema": self.ema.state_dict()},
                    blocking=blocking,
                    metric=metric,
                    rank_state=self._compression.state_dict(),
                    averages=averages,
                    given=self._given,
                    again=again,
                    more=more,
                )
        self.note()
        if is_new:
            self._saved = (step, state["progress"], metric)
            is_written = blocking or not self._config.checkpoint.background
            self._recorder.record("checkpoint", {"state": "written" if is_written else "being written"})

    def keep_best(
        self, found: Mapping[str, float], progress: Progress, gather_state: Callable[[], dict[str, Any]]
    ) -> None:
        """Judge an evaluation by ``evaluate.best``, and save the run where it is one of the best that are kept.

        Raises:
            TrainerConfigError: the evaluation has no such metric.
        """
        config = self._config.evaluate
        if config.best is None:
            return
        if config.best not in found:
            returned = f"it returns {', '.join(sorted(found))}" if found else "no rank had a batch to evaluate"
            raise TrainerConfigError(
                f"evaluate.best={config.best!r} is no metric of the evaluation; {returned}"
                f"{did_you_mean(config.best, found)}"
            )
        metric, most = found[config.best], self._config.checkpoint.keep_best
        self.judge(progress)
        progress.improve(metric)
        if progress.evaluations_without_better == config.patience:
            self._recorder.note(
                f"training ends: {config.best} was not better than {progress.best} (step {progress.best_step}) in "
                f"{config.patience} evaluations"
            )
        if most and progress.is_among_best(metric, most):
            self.save(progress.step, gather_state(), blocking=False, metric=metric)

    def judge(self, progress: Progress) -> None:
        """Have ``progress`` judge by ``evaluate.best``; that a run judged by something else before is noted."""
        if self._config.evaluate.best is not None:
            forgotten = progress.judge_by(self._config.evaluate.best, self._config.best_end)
            if forgotten is not None:
                self._recorder.note(f"{forgotten}; checkpoints kept for it now count as any other")

    def go_back(self, at_most: int) -> tuple[int, dict[str, Any]] | None:
        """Restore as ``load_newest`` does, from a step no later than ``at_most``, and delete later checkpoints.

        Raises:
            NonFiniteLossError: on every rank, if the last step's gradients were not finite, and that is to stop a run.
        """
        self._settle()  # else the next step would learn of gradients that this takes back
        found = self.load_newest(at_most)
        if found is not None and self.checkpointer is not None:
            if self.averager is not None:
                self.averager.are_alike = True
            for step in self.checkpointer.delete_after(found[0]):
                self._recorder.note(
                    f"the checkpoint of step {step} is deleted, because training goes back to an earlier one"
                )
        return found

    def save_again(self, step: int, state: dict[str, Any]) -> None:
        """Save the step that was loaded last with another ``state``, behind training; its metric stays."""
        if self.checkpointer is not None:
            self.save(step, state, blocking=False, metric=self.checkpointer.loaded_metric(), again=True)

    def load_newest(self, at_most: int | None = None) -> tuple[int, dict[str, Any]] | None:
        """Restore weights, optimizer and compression from the newest checkpoint; returns its step and state, if any."""
        if self.checkpointer is None:
            return None
        self._stopwatch.enter("resume")
        if self.learners is not None:
            self.learners.settle()
        found = self.checkpointer.load_newest(
            self._parallel.inner,
            self._optimizer,
            at_most=at_most,
            averages=None if self.ema is None else self.ema.named(),
            given=self._given,
            parts=() if self.learners is None else (_DILOCO, self._own_part),
        )
        self.note()
        for step, damage in self.checkpointer.passed_over.items():
            self._recorder.note(f"the checkpoint of step {step} is damaged and skipped: {damage}")
        if found is not None:
            now, then = type(self._optimizer).__name__, found[1].get("optimizer")
            if then not in (now, None):  # some keep the same state, and do something else with it
                self._recorder.note(f"the optimizer is {now}; the checkpoint had {then}, whose state it continues with")
            for change in self.checkpointer.changed_settings:
                self._recorder.note(change)
            # Where a replica lies on several ranks nothing is compressed; what single ranks owed is not theirs.
            owed = {} if self._parallel.mesh.is_spread else self.checkpointer.load_rank_state()
            self._compression.load_state_dict(owed, steps=found[0])
            self._load_ema(self.checkpointer, found[1])
            self._load_learners(self.checkpointer, found[1].get(_DILOCO))
        return found

    def settle_weights(self, *, resumed: bool) -> None:
        """Load the weights that a new run starts with, if it has such; all weights then have values. A collective.

        Raises:
            CheckpointError: they cannot be read, or do not fit the model.
            TrainerConfigError: the model was built on the meta device, and something of it would stay unwritten.
        """
        materialiser, source = self._parallel.materialiser, self._config.init_from
        if resumed:
            if materialiser.is_needed:
                materialiser.loaded(frozenset(get_model_state_dict(self._parallel.inner)))
            if source is not None:
                self._recorder.note(f"init_from={source!r} is ignored: the run resumes from its own checkpoint")
        elif source is not None:
            config = self._config.warm_start
            found = load_weights(
                self._parallel.inner,
                source,
                config,
                self._parallel.mesh,
                entered=self._stopwatch.enter,
                stages=self._parallel.stages,
            )
            materialiser.loaded(found.loaded)
            self._recorder.note(found.describe())
        materialiser.refuse()
        if self.checkpointer is not None:
            self._constants = find_infinite_constants(self._parallel.inner)
            if self._parallel.world.is_first and (problem := keep_model_config(self._parallel.inner, self._folder)):
                self._recorder.note(problem)
        if self.ema is not None and not resumed:
            self.ema.begin()
        if self.learners is not None and not resumed:
            self.learners.begin()

    def _load_ema(self, checkpointer: Checkpointer, state: dict[str, Any]) -> None:
        """Continue the moving average; what the checkpoint has none of starts from the weights, and that is noted."""
        if self.ema is None:
            if "ema" in state:
                self._recorder.note("the checkpoint's average of the weights is dropped; set ema.decay to keep it")
            return
        self.ema.begin()
        lacking, alone = checkpointer.load_averages(self.ema.named())
        if "ema" in state:
            self.ema.load_state_dict(state["ema"])
        if lacking:
            what = f"for {list_some(lacking, _NAMED)}" if "ema" in state else "of the weights"
            self._recorder.note(f"the checkpoint has no average {what}: it starts from the checkpoint's weights")
        if alone:
            self._recorder.note(f"the average of what is no longer trained is dropped: {list_some(alone, _NAMED)}")

    @property
    def _own_part(self) -> str:
        """The part of a checkpoint that is this rank's learner's alone."""
        return f"{_LEARNERS}.{self._parallel.mesh.learner}"

    def _load_learners(self, checkpointer: Checkpointer, saved: Mapping[str, Any] | None) -> None:
        """Continue as the learners of the checkpoint, of which ``saved`` is the state; what is otherwise is noted."""
        learners, number = self.learners, 0 if saved is None else saved["learners"]
        if learners is None:
            if number > 1:
                self._recorder.note(
                    f"the checkpoint is of {number} learners, and parallel.mode={self._config.parallel.mode!r} has "
                    "none: training continues from the mean of their weights and of their optimizers"
                )
            return
        learners.begin()
        if saved is None:
            self._recorder.note("the checkpoint has no outer optimizer: all learners start from its weights")
            return
        checkpointer.load_part(_DILOCO, learners.shared_tensors())
        if number == self._parallel.mesh.learners:
            checkpointer.load_part(self._own_part, learners.own_tensors())
        for note in learners.resume(saved):
            self._recorder.note(note)

    def finish(self, step: int, state: dict[str, Any], *, stopped_by: str) -> None:
        """Leave all ranks with one model, save it, and export it where that is asked for.

        ``stopped_by`` is the signal that ends training before its end, or empty.
        """
        if stopped_by:
            self._recorder.note(f"stopping after this step: {stopped_by}")
        self._settle()
        if self.averager is not None and not self.averager.are_alike:
            self.averager.average_all()
        self._parallel.agree_on_buffers()
        self.save(step, state, blocking=True, **self._ended_since(step, state))
        if self.learners is not None:
            self.learners.average_all()  # once each learner's own state is saved
        if self.checkpointer is None:
            return
        if self._config.export is not None and self._parallel.world.is_first:
            path = Path(self._config.output_dir) / self._config.export
            newest = self.checkpointer.name_of(step)
            with self._stopwatch.phase("export"):
                export_safetensors(newest, path, weights="model" if self.ema is None else "ema")

    def _ended_since(self, step: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments to save the last step again, if it was saved before the epoch's end and the loader has no state."""
        if self._saved is None or self._saved[0] != step or state["feed"].get("loader", self) is not None:
            return {}
        return {} if self._saved[1] == state["progress"] else {"again": True, "metric": self._saved[2]}

    def note(self) -> None:
        """Hand the checkpointer's notes to the observers."""
        for note in self.checkpointer.take_notes() if self.checkpointer is not None else ():
            self._recorder.note(note)

    def close(self) -> None:
        """Finish the save under way; closing twice is allowed."""
        with ExitStack() as stack:
            if self.averager is not None:
                stack.callback(self.averager.close)
            if self.learners is not None:
                stack.callback(self.learners.close)
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
