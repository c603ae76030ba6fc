"""One model on all ranks while it is evaluated or saved, and its checkpoints over a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.optim import Optimizer

from .checkpoint.checkpointer import Checkpointer, export_safetensors
from .compression.compression import Compression
from .config import TrainerConfig
from .finite import refuse_weights
from .parallel.averaging import PeriodicAverager
from .parallel.model import ParallelModel
from .report.recorder import Recorder
from .stopwatch import Stopwatch
from .weights.warm_start import load_weights


class Saver:
    """Owns the checkpointer, where checkpoints are asked for, and the averager of local SGD.

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
        self.averager: PeriodicAverager | None = None
        self.checkpointer: Checkpointer | None = None
        world = parallel.world
        if config.averaging is not None:
            self.averager = PeriodicAverager(
                parallel.inner, optimizer, config.averaging, world, count_sum=compression.wire.add_ring
            )
        if config.keeps_checkpoints:
            given = config.checkpoint
            folder = given.folder if given.is_remote else str(Path(config.output_dir) / given.folder)
            resolved = replace(given, folder=folder, best=config.best_end)
            try:
                self.checkpointer = Checkpointer(resolved, world)
                self.checkpointer.entered = stopwatch.enter
                self.checkpointer.check_room(parallel.inner)
            except BaseException:
                self.close()
                raise

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """All ranks have one model within this: what is evaluated is what is saved, and training goes on as without.

        Raises:
            NonFiniteLossError: on every rank, if the last step's gradients were not finite.
        """
        self._settle()
        with ExitStack() as stack:
            if self.averager is not None:
                with self._stopwatch.phase("average"):
                    stack.enter_context(self.averager.averaged())
            self._parallel.agree_on_buffers()
            yield

    def average_if_due(self, step: int) -> None:
        """Average what local SGD averages after this step."""
        if self.averager is not None:
            with self._stopwatch.phase("average"):
                self.averager.average_if_due(step)

    def save(self, step: int, state: dict[str, Any], *, blocking: bool, metric: float | None = None) -> None:
        """Save the run after ``step``, where checkpoints are kept; ``state`` is the same on every rank.

        Raises:
            NonFiniteLossError: on every rank, where a weight is not finite; nothing is saved then.
            CheckpointError: the save failed.
        """
        if self.checkpointer is None:
            return
        with self.agreed():
            refuse_weights(self._parallel.inner, step, self._parallel.world)
            with self._stopwatch.phase("checkpoint"):
                is_new = self.checkpointer.save(
                    step,
                    self._parallel.inner,
                    self._optimizer,
                    state,
                    blocking=blocking,
                    metric=metric,
                    rank_state=self._compression.state_dict(),
                )
        self.note()
        if is_new:
            is_written = blocking or not self._config.checkpoint.background
            self._recorder.record("checkpoint", {"state": "written" if is_written else "being written"})

    def load_newest(self) -> tuple[int, dict[str, Any]] | None:
        """Restore weights, optimizer and compression from the newest checkpoint; returns its step and state, if any."""
        if self.checkpointer is None:
            return None
        self._stopwatch.enter("resume")
        found = self.checkpointer.load_newest(self._parallel.inner, self._optimizer)
        self.note()
        for step, damage in self.checkpointer.passed_over.items():
            self._recorder.note(f"the checkpoint of step {step} is passed over: {damage}")
        if found is not None:
            for change in self.checkpointer.changed_settings:
                self._recorder.note(change)
            self._compression.load_state_dict(self.checkpointer.load_rank_state(), steps=found[0])
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
                self._parallel.inner, source, config, self._parallel.world, entered=self._stopwatch.enter
            )
            materialiser.loaded(found.loaded)
            self._recorder.note(found.describe())
        materialiser.refuse()

    def finish(self, step: int, state: dict[str, Any], *, stopped: bool) -> None:
        """Leave all ranks with one model, save it, and export it where that is asked for."""
        self._settle()
        if stopped and self.checkpointer is None:
            self._recorder.note("asked to stop: nothing is saved, because checkpoint.every_steps=0")
        if self.averager is not None and not self.averager.are_alike:
            self.averager.average_all()
        self._parallel.agree_on_buffers()
        self.save(step, state, blocking=True)
        if self.checkpointer is None:
            return
        if self._config.export is not None and self._parallel.world.is_first:
            newest = self.checkpointer.name_of(step)
            export_safetensors(newest, Path(self._config.output_dir) / self._config.export)
        if stopped:
            self._recorder.note(f"asked to stop: saved after step {step}")

    def note(self) -> None:
        """Hand the checkpointer's notes to the observers."""
        for note in self.checkpointer.take_notes() if self.checkpointer is not None else ():
            self._recorder.note(note)

    def close(self) -> None:
        """Finish the save under way; closing twice is allowed."""
        with ExitStack() as stack:
            if self.averager is not None:
                stack.callback(self.averager.close)
            if self.checkpointer is not None:
                stack.callback(self.checkpointer.close)
