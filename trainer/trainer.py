"""The training loop. It reads top to bottom; everything it calls is in a file of its own."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from .config import TrainerConfig
from .data.feed import Feed
from .data.fit import check_peers, check_share, must_check_peers
from .data.shares import SpeedShares
from .errors import TrainerConfigError, TrainerError
from .evaluation.evaluate import Evaluation, find_other_classes
from .evaluation.modes import begin_training
from .parallel.config import open_mesh
from .parallel.materialise import Initialiser
from .parallel.model import OptimizerFactory
from .parallel.precision import tell_device, tell_scaling
from .parts import make_parts
from .ranks.mesh import Mesh
from .ranks.world import World, open_world
from .report.console import print_times
from .report.flops import FlopCount
from .report.progress import Progress, Summary
from .report.recorder import Recorder
from .report.records import Callbacks, Observer
from .report.tracing import Tracer
from .reproducibility import deterministic_kernels, seed_step, tell_seed
from .run.evaluator import Evaluator
from .run.guard import Guard, list_activities, list_advances
from .run.length import agree_on_length, count_steps, is_done, leaves_steps
from .run.rewinder import Rewinder
from .run.saver import Saver
from .steps.consistency import agree_on_options
from .steps.loss import LossFunction
from .stopwatch import DeviceClock, Stopwatch


class DistributedTrainer:
    """Trains a model on an iterable of batches, on as many ranks as there are.

    ``optimizer`` is a fresh one over the model's parameters, or a function from parameters to one. ``loader`` yields
    this rank's share of each global batch, and as many batches on every rank; with ``state_dict`` and
    ``load_state_dict`` training resumes at the exact sample. ``loss`` takes (model, batch) and returns the sum of the
    losses and their count (of samples or tokens); the gradient is that of the mean over all ranks and microbatches.
    ``mesh`` is that of ``open_mesh(config.parallel, world)``, and made here where it is None: give it where a loader
    needs it, too.

    A model on the meta device (``build_on_meta``) gets its memory here, module by module; ``initialise`` takes (name,
    module) and writes the initial values that the module's ``reset_parameters`` does not.

    With checkpoints, a new trainer continues from the newest one in the folder that verifies. Every rank makes the
    trainer and makes the same calls, in its main thread; making it, ``train`` and ``evaluate`` are collectives.

    Raises:
        TrainerConfigError: something cannot work, as far as that can be known before the first step.
        CheckpointError: the folder cannot be written, or has checkpoints of which none verifies.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        loader: Iterable[Any],
        config: TrainerConfig,
        *,
        loss: LossFunction,
        evaluation: Evaluation | None = None,
        observers: Sequence[Observer | Callbacks] = (),
        world: World | None = None,
        mesh: Mesh | None = None,
        initialise: Initialiser | None = None,
    ) -> None:
        self.config = config
        self.world = mesh.world if mesh is not None else open_world(device=config.device) if world is None else world
        sizes = config.parallel.fill(self.world.world_size, self.world.num_nodes)
        if mesh is not None and mesh.sizes != sizes:
            raise TrainerConfigError(
                f"mesh has {mesh.sizes} and config.parallel makes {sizes}; give open_mesh(config.parallel, world), or "
                "leave mesh out"
            )
        self.progress = Progress()
        self.stopwatch = Stopwatch(clock=DeviceClock() if self.world.device.type == "cuda" else None)
        if evaluation is None and (config.evaluate.every or config.evaluate.best):
            raise TrainerConfigError("evaluate.every or evaluate.best is set and there is no evaluation; give one")
        self._guard = Guard(
            self.world,
            self.progress,
            self.stopwatch,
            stall_timeout_s=config.stall_timeout_s,
            report_folder=Path(config.output_dir) / "stalls",
            activities=list_activities(loader, evaluation, self._name_module),
            progress_of=list_advances(config.compile.timeout_s),
            traces=config.profile.signal_steps > 0,
            sizes=sizes,
        )
        with self._guard.watching():
            self.mesh = open_mesh(config.parallel, self.world) if mesh is None else mesh
            self._build(model, optimizer, loader, evaluation, loss=loss, observers=observers, initialise=initialise)

    def _build(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | OptimizerFactory,
        loader: Iterable[Any],
        evaluation: Evaluation | None,
        *,
        loss: LossFunction,
        observers: Sequence[Observer | Callbacks],
        initialise: Initialiser | None,
    ) -> None:
        """Make the parts and resume, while the ranks watch each other."""
        config = self.config
        self._feed = Feed(loader, accumulate=config.step.accumulate, mesh=self.mesh)
        agree_on_options(config, evaluation is not None, self.world)
        check_share(loader, self.mesh)
        if evaluation is not None:
            check_share(evaluation.batches, self.mesh, "evaluation.batches")
        self._has_checked_peers = not must_check_peers(loader, self.mesh)
        self._shares = SpeedShares(loader, self.mesh) if config.shares == "auto" else None
        length = agree_on_length(loader, self.world, self.stopwatch.enter)
        self._feed.expect(length, self._guard.check_end, lambda *end: leaves_steps(config, evaluation, *end))
        total_steps = count_steps(config, length, loader)
        self._recorder = Recorder(self.progress, self.stopwatch, total_steps, loader)
        self._recorder.flops = FlopCount(config.report, model, loss, self.world, config.precision.dtype)
        self._tracer = Tracer(config.profile, config.output_dir, self.world, self.stopwatch, self._recorder.note)
        parts = make_parts(
            config,
            self.mesh,
            self.stopwatch,
            model,
            optimizer,
            loader,
            loss=loss,
            initialise=initialise,
            total_steps=total_steps,
            clock=None if self._shares is None else self._shares.clock,
        )
        self.parallel, self.optimizer, self.schedule = parts.parallel, parts.optimizer, parts.schedule
        self._passes = parts.passes
        self.compression, self.steps, self._microbatches = parts.compression, parts.steps, parts.microbatches
        try:
            self._saver = Saver(
                config,
                self.parallel,
                self.optimizer,
                self.compression,
                recorder=self._recorder,
                stopwatch=self.stopwatch,
                settle=self.steps.settle,
            )
            self._rewinder = Rewinder(
                config,
                saver=self._saver,
                feed=self._feed,
                steps=self.steps,
                progress=self.progress,
                recorder=self._recorder,
                stopwatch=self.stopwatch,
                gather_state=self._gather_state,
                record_steps=self._record_steps,
            )
            self._evaluator = Evaluator(
                config,
                evaluation,
                self.parallel,
                parts.passes,
                saver=self._saver,
                guard=self._guard,
                progress=self.progress,
                recorder=self._recorder,
                stopwatch=self.stopwatch,
                gather_state=self._gather_state,
            )
            self._recorder.open(observers, config.report, Path(config.output_dir), self.mesh)
            if problem := find_other_classes(loader, evaluation):
                self._recorder.note(problem)
            self._resume()
        except BaseException as exc:
            self.close(exc)
            raise

    def train(self) -> Summary:
        """Train until the steps or epochs are done, or a signal asks to stop; ranks' summaries differ in times only.

        Raises:
            NonFiniteLossError: on every rank, if the policy is to stop or too many steps were skipped.
            StallError: on every rank, if one of them stalled, failed or died.
            TrainerError: the trainer is closed, or an observer calls this.
        """
        self._recorder.refuse("train", closed=True)
        started = time.perf_counter()
        begin_training(self.parallel.inner)
        parallel, dtype = self.config.parallel, self.config.precision.dtype
        learners = {"learners": self.mesh.learners} if parallel.mode == "diloco" else {}
        self._recorder.start(self.mesh, self.parallel.inner, {"zero": parallel.zero, "dtype": dtype, **learners})
        with self._guard, deterministic_kernels(self.config.deterministic), closing(self._tracer):
            stopped = self._end_known_epoch(stopped=self._evaluator.make_up())
            while not stopped and not is_done(self.config, self.progress):
                self._tracer.begin_step(self.progress.step)
                batches = self._fetch()
                if not batches:  # the epoch is over
                    stopped = self._end_epoch()
                    continue
                if not self._has_checked_peers:
                    if problem := check_peers(batches[0], self.mesh):
                        self._recorder.note(problem)
                    self._has_checked_peers = True
                self.stopwatch.enter("microbatches")
                microbatches = self._microbatches.make(batches, self._recorder.note)
                self._recorder.settle_flops(microbatches[0])
                seed_step(self.config.seed, self.progress.step, self.mesh.drawing_rank, self.world.device)
                self.schedule.set_rates(self.progress.updates)
                result = self.steps.run(
                    self.progress.step,
                    microbatches,
                    stop_requested=self._guard.is_stop_requested(),
                    trace_requested=self._guard.is_trace_requested(),
                    epoch=self.progress.epoch,
                )
                self.compression.end_step()
                self.progress.count(result)
                self._recorder.add(result)
                if result.trace_requested:
                    self._tracer.request(self.progress.step)
                self._saver.end_step(
                    self.progress.step,
                    updated=result.outcome == "updated",
                    own_count=result.learner_count,
                    count=result.count,
                )
                if self._shares is not None:
                    self._share_anew(self._shares, microbatches)
                if self.progress.step % self.config.report.every == 0:
                    self._record_steps()
                stopped = result.stop_requested
                if self._rewinder.follow(result):
                    continue
                stopped = self._end_known_epoch(stopped=self._evaluator.end_step(stopped=stopped))
                if not stopped and self._rewinder.is_save_due(self._is_multiple(self.config.checkpoint.every_steps)):
                    self._saver.save(self.progress.step, self._gather_state(), blocking=False)
            self._tracer.finish()
            self._record_steps()
            stopped_by = self._guard.stop_signal() if stopped else ""
            self._saver.finish(self.progress.step, self._gather_state(), stopped_by=stopped_by)
            by_others = stopped and self.world.num_nodes > 1 and not self._guard.is_stop_requested()
        summary = self._recorder.finish(
            time.perf_counter() - started,
            stopped_by=stopped_by,
            resumes_at=self.progress.step if stopped and self._saver.checkpointer is not None else None,
            by_others=by_others,
            metrics=self.progress.metrics,
            sent=self.compression.stats,
        )
        if self.world.is_first and not self.config.report.quiet:
            print_times(summary.phase_seconds, summary.seconds)
        return summary

    def evaluate(self) -> dict[str, float] | None:
        """The metrics over all evaluation data, or None without any or when a signal asks to stop; a collective."""
        return self._evaluator.evaluate()

    def state_dict(self) -> dict[str, Any]:
        """Everything but weights and optimizer state: small, JSON, and readable on any number of ranks."""
        return {
            "version": 1,
            "progress": self.progress.state_dict(),
            "steps": self.steps.state_dict(),
            "feed": self._feed.state_dict(),
            "spikes": self._rewinder.state_dict(),
            "sent": self.compression.wire.state_dict(),
            "microbatches": self._microbatches.state_dict(),
            "random": {"policy": "seed, step, rank", "seed": self.config.seed},
            "schedule": self.schedule.describe(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from ``state``, on any number of ranks."""
        if state.get("version") != 1:
            raise TrainerError(f"the state has version {state.get('version')!r} and this trainer reads version 1")
        self.progress.load_state_dict(state["progress"])
        self._saver.judge(self.progress)
        self.steps.load_state_dict(state["steps"])
        self._feed.load_state_dict(state["feed"])
        self._rewinder.load_state_dict(state.get("spikes"))
        self._microbatches.load_state_dict(state.get("microbatches"))
        if "sent" in state:  # states of before do not have it
            self.compression.wire.load_state_dict(state["sent"])

    def close(self, error: BaseException | None = None) -> None:
        """Finish the save under way and close what the trainer opened; loader and process group are the caller's.

        ``error`` is what ended the run, for those who look at it. A TrainerError meets an observer that calls this.
        """
        self._recorder.refuse("close")
        with ExitStack() as stack:
            stack.callback(self._recorder.close, error)
            if hasattr(self, "_saver"):  # its own constructor may have failed
                stack.callback(self._saver.close)
                stack.callback(self.schedule.end)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close(error)
        except TrainerError as exc:
            if error is None:
                raise
            error.add_note(f"and while closing: {exc}")  # a consequence must not stand before its cause

    def _resume(self) -> None:
        self._feed.tell_limits(self._recorder.note)
        tell_device(self.config.precision, self.world.device, self._recorder.note)
        found = self._saver.load_newest()
        self._saver.settle_weights(resumed=found is not None)
        if found is None:
            return
        step, state = found
        self.stopwatch.enter("loader state")
        self.load_state_dict(state)
        self.schedule.tell_changes(state.get("schedule"), self._recorder.note, self._saver.groups_then)
        tell_scaling(self.config.precision, state["steps"]["scaler"], self._recorder.note)
        tell_seed(self.config.seed, state.get("random"), self._recorder.note)
        self._recorder.record("resume", {"world_size": self.world.world_size})
        done = "; the run had ended there" if is_done(self.config, self.progress) else ""
        self._recorder.note(f"resumed from the checkpoint of step {step}{done}")

    def _name_module(self) -> dict[str, str]:
        return self.parallel.activity()  # made after the guard

    def _is_multiple(self, every: int | None) -> bool:
        return bool(every) and self.progress.step % (every or 1) == 0

    def _fetch(self) -> list[Any]:
        seed_step(self.config.seed, self.progress.step, self.mesh.replica, self.world.device, "fetch")
        with self.stopwatch.phase("fetch"):
            return self._feed.take(self.progress.epoch)

    def _end_epoch(self, *, stopped: bool = False) -> bool:
        """Count the epoch, evaluate if that is due, and return whether a signal asks to stop."""
        self._feed.tell_left_out(self.progress.epoch, self._recorder.note)
        self.progress.epoch += 1
        return self._evaluator.end_epoch(stopped=stopped)

    def _end_known_epoch(self, *, stopped: bool) -> bool:
        """End an epoch as ``_end_epoch`` does, where it ends with the run's last step; later draws continue from it.

        Each that ends by the length of a loader without a state, too: no save tells a resumed run where it was.
        """
        is_last = is_done(self.config, self.progress) and not stopped
        if (is_last or not self._feed.is_exact) and self._feed.find_end(self.progress.epoch):
            return self._end_epoch(stopped=stopped)
        return stopped

    def _share_anew(self, shares: SpeedShares, microbatches: Sequence[Any]) -> None:
        shares.add(microbatches)
        if self._is_multiple(self.config.shares_every):
            with self.stopwatch.phase("shares"):
                shares.rebalance()

    def _gather_state(self) -> dict[str, Any]:
        self._saver.finish_exchange()
        return self.state_dict() | {"feed": self._feed.gather_state()}

    def _record_steps(self) -> None:
        self._saver.note()
        self._recorder.record_steps(
            {
                "rate": self.schedule.rate,
                "loss_scale": self.steps.loss_scale,
                "wire_bytes": self.compression.stats.wire_bytes,
                **self._passes.describe(),
                **self._saver.describe(),
            },
            self.parallel.describe_steps(),
        )
