"""One update: forward and backward over the microbatches, exact normalisation, clipping, the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from ..errors import NonFiniteLossError, TrainerError
from ..options import check_choice, check_range
from ..parallel.buffers import BufferCopies
from ..parallel.checks.limits import named_if_it_fails, updating_alike
from ..parallel.checks.parameters import KnownParameters
from ..parallel.model import ParallelModel
from ..parallel.passes import Passes
from ..parallel.precision import LossScaler, PrecisionConfig
from .consistency import Settings
from .finite import NonFinitePolicy
from .gradients import Gradients
from .loss import LossFunction, check_count, check_loss
from .losses import StepLosses
from .totals import Reading, Totals

# fp16's loss scale starts at 2**16 and halves at each overflow; gradients that overflow even here are not finite.
_LEAST_LOSS_SCALE = 2.0**-24

Phase = Callable[[str], AbstractContextManager[Any]]
Outcome = Literal["updated", "overflow", "non-finite", "empty"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What one update consists of."""

    accumulate: int = 1
    """Batches of the loader, on each rank, in one update."""

    microbatch: int | None = None
    """Most rows of a microbatch: larger batches are cut, and their gradients added up; none: batches are not cut."""

    adaptive_batch: bool = False
    """Find the largest microbatch, of microbatch rows at most, that fits the device's memory, before the first step."""

    clip_norm: float | None = None
    """Largest global norm of the gradients."""

    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """Stop at a loss or gradient that is NaN or infinite, skip the update, or rewind as for a loss spike."""

    max_skipped: int = 10
    """With on_nan=skip or rewind, stop after more skipped updates than this."""

    def __post_init__(self) -> None:
        check_range("step.accumulate", self.accumulate, low=1)
        check_range("step.microbatch", self.microbatch, low=1)
        check_range("step.clip_norm", self.clip_norm, low=0.0, above=True)
        check_choice("step.on_nan", self.on_nan, ("stop", "skip", "rewind"))
        check_range("step.max_skipped", self.max_skipped, low=0)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of a step, the same on every rank: mean loss over ``count`` samples or tokens of ``rows`` rows.

    ``gradient_norm`` is that of the mean's gradient before clipping: a 0-dim tensor where nothing has waited for it
    yet, None where no update was tried.
    """

    loss: float
    count: float
    rows: int
    gradient_norm: float | torch.Tensor | None
    outcome: Outcome
    stop_requested: bool
    trace_requested: bool = False
    learner_count: float = 0.0
    """The part of ``count`` that this rank's learner trained on; all of it where there is one."""


class StepRunner:
    """Runs steps of one model; its state is the last global count, the steps skipped so far, the loss scale, a flag.

    The loss is a sum; the update uses the gradient of its mean over all ranks and microbatches. The global count is
    known only after the last forward, so the loss is scaled by ``replicas / expected count``, where the expected count
    is the previous step's, the same on every rank, and the reduced gradients are corrected by the ratio of the two.
    Batches of equal counts, the common case, need no correction. Ranks that exchange no gradients each use their own
    mean, and so do learners. Where gradients are added to what is owed, ``correct`` is told the ratio before the last
    backward, which waits for it, or None where there is no count. ``is_saved`` is whether checkpoints are kept.

    On CUDA a step waits once, for the sums of its forwards, while its backward is under way; the device never runs dry.
    Whether gradients are finite is known after that: with ``on_nan="stop"`` it is told with the next step's sums, and
    ``settle`` asks for it. Skipping needs to know before the update, and so do fp16's scaler and gradients that this
    rank lacks; they wait for the device. ``reads_late`` is for tests.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        passes: Passes,
        config: StepConfig,
        precision: PrecisionConfig,
        phase: Phase,
        correct: Callable[[float | None], None] | None = None,
        reads_late: bool | None = None,
        is_saved: bool = False,
    ) -> None:
        self._parallel = parallel
        self._passes = passes
        self._mesh = parallel.mesh
        self._world = parallel.world
        self._optimizer = optimizer
        self._loss = loss
        self._config = config
        self._phase = phase
        self._correct = correct
        self._scaler = LossScaler(precision, self._world)
        self._gradients = Gradients(parallel, optimizer)
        self._settings = Settings(optimizer, self._mesh, parallel.inner)
        whole = {} if parallel.usage is None else parallel.usage.whole
        self._known = KnownParameters(parallel.inner, whole, is_saved=is_saved)
        on_cuda = self._world.device.type == "cuda"
        can_read_late = config.on_nan == "stop" and not self._scaler.is_enabled()
        self._reads_late = can_read_late and (on_cuda if reads_late is None else reads_late)
        self._unread: tuple[int, torch.Tensor] | None = None  # the step before, and whether its gradients are bad
        self._expected_count: float | None = None
        self._policy = NonFinitePolicy(self._mesh, may_skip=config.on_nan != "stop", max_skipped=config.max_skipped)

    @property
    def loss_scale(self) -> float | None:
        """The current factor on the loss for fp16; None otherwise."""
        return float(self._scaler.get_scale()) if self._scaler.is_enabled() else None

    @property
    def last_problem(self) -> str:
        """In words, what was not finite in the step that was skipped last."""
        return self._policy.last_problem

    def state_dict(self) -> dict[str, Any]:
        """JSON, and the same for any number of ranks."""
        return {
            "expected_count": self._expected_count,
            "skipped": self._policy.skipped,
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._expected_count = state["expected_count"]
        self._policy.skipped = state["skipped"]
        if self._scaler.is_enabled() and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def run(
        self,
        step: int,
        microbatches: Sequence[Any],
        *,
        stop_requested: bool = False,
        trace_requested: bool = False,
        epoch: int = 0,
    ) -> StepResult:
        """Forward and backward of this rank's microbatches, then the update; a collective over all ranks.

        ``epoch`` is that of the microbatches.

        A step that is skipped leaves no trace: weights, optimizer, buffers and the expected count are as before it.

        Raises:
            NonFiniteLossError: on every rank alike, before the weights are touched.
            TrainerError: the same, where the ranks are in different epochs, or their optimizers have other settings.
            TrainerConfigError: the model has got other parameters.
        """
        with self._phase("forward"):
            self._known.check()
            self._parallel.begin_step()
        buffers, expected_before = self._copy_buffers(), self._expected_count
        own, reading, totals = None, None, None

        def exchange() -> None:
            nonlocal own, reading, totals
            own = Reading(losses.sums.own_count()) if self._parallel.trains_alone else None
            reading = losses.sums.exchange(
                stop=stop_requested,
                trace=trace_requested,
                order=self._parallel.order_marks(),
                epoch=epoch,
                settings=self._settings.mark(),
                late=None if self._unread is None else self._unread[1],
                times=self._passes.take_times(),
            )
            if self._correct is not None:
                totals = self._read(reading)
                assert losses.expected_count is not None, "there was a microbatch"
                self._correct(losses.expected_count / totals.count if totals.count > 0 else None)

        losses = StepLosses(
            self._mesh,
            len(microbatches),
            expected_count=self._expected_count,
            knows_losses_first=self._passes.knows_losses_first,
            scaler=self._scaler,
            exchange=exchange,
        )
        for index, batch in enumerate(microbatches):
            losses.begin(batch)
            with self._parallel.computing(batch):
                self._passes.train(batch, self._checked_loss, losses, last=index == len(microbatches) - 1)
        self._expected_count = losses.expected_count
        self._parallel.check_gradients()
        assert reading is not None, "there was a microbatch"
        assert self._expected_count is not None, "there was a microbatch"
        totals = self._read(reading) if totals is None else totals
        self._passes.add_times(totals.scheduled, totals.computed)
        unread, self._unread = self._unread, None
        if totals.late and unread is not None:
            self._policy.refuse_late(unread[0], self._parallel.inner.named_parameters())
        self._parallel.check_order((one.total, one.squares) for one in totals.orders)
        self._settings.check(totals.settings)
        check_count(totals.count, f"step {step}: the ranks' loss functions together returned")
        if totals.epoch_squares * self._world.world_size != totals.epoch * totals.epoch:
            self._refuse_epochs(step, epoch)
        norm: float | torch.Tensor | None = None
        outcome: Outcome
        if not math.isfinite(totals.loss):
            self._policy.meet_losses(step, microbatches, losses.by_microbatch)
            outcome = "non-finite"
        elif not totals.count:
            outcome = "empty"
        else:
            with self._phase("optimizer"):
                apart = self._mesh.learners > 1
                if own is None:
                    right = totals.learner_counts[self._mesh.learner] * self._mesh.learners
                else:
                    right = own.wait()[0] * self._world.world_size
                followed = losses.by_microbatch if apart or own is not None else [totals.loss]
                is_right = self._correct is not None or not right
                outcome, norm = self._update(step, 1.0 if is_right else self._expected_count / right, followed)
            self._expected_count = totals.count
        if outcome == "non-finite":
            self._expected_count = expected_before
            if buffers is not None:
                buffers.restore()
        self._gradients.clear()
        self._parallel.end_step(updated=outcome == "updated")
        return StepResult(
            loss=totals.loss / totals.count if totals.count else math.nan,
            count=totals.count,
            rows=int(totals.rows),
            gradient_norm=norm,
            outcome=outcome,
            stop_requested=totals.stop > 0,
            trace_requested=totals.trace > 0,
            learner_count=totals.learner_counts[self._mesh.learner],
        )

    def settle(self) -> None:
        """Wait until it is known whether the last step's gradients were finite; a collective.

        To be called before the weights are evaluated, saved or handed back.

        Raises:
            NonFiniteLossError: on every rank, if they were not.
            TrainerConfigError: the model has got other parameters.
        """
        self._known.check()
        unread, self._unread = self._unread, None
        if unread is None:
            return
        step, bad = unread
        if self._world.world_size > 1:
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        if bad.item():
            self._policy.refuse_late(step, self._parallel.inner.named_parameters())

    def _read(self, reading: Reading) -> Totals:
        with self._phase("reduce"):
            return Totals.read(reading.wait(), self._mesh.learners)

    def _refuse_epochs(self, step: int, epoch: int) -> NoReturn:
        """Name the ranks' epochs; a collective."""
        epochs = [0] * self._world.world_size
        dist.all_gather_object(epochs, epoch)
        raise TrainerError(
            f"step {step}: ranks 0 to {self._world.world_size - 1} are in epochs {epochs}, and no weight was changed: "
            "the loaders of those that are ahead gave fewer batches than len(loader) says; give every rank as many, or "
            "take the length away, so that an epoch ends on all ranks with the first of them"
        )

    def _copy_buffers(self) -> BufferCopies | None:
        """Copies of the buffers, where a step may be skipped: a batch norm has then seen what is not finite."""
        return None if self._config.on_nan == "stop" else BufferCopies(self._parallel.inner)

    def _checked_loss(self, model: nn.Module, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        return check_loss(self._loss(model, batch))

    def _update(
        self, step: int, correction: float, losses: Sequence[torch.Tensor | float]
    ) -> tuple[Outcome, float | torch.Tensor | None]:
        """Correct, clip and use the gradients, if they are finite as far as that is known."""
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
        measured = self._gradients.measure(losses)
        if measured.used is not None:
            self._parallel.drop_unused(measured.used.tolist())
        norm: float | torch.Tensor = measured.norm if correction == 1.0 else measured.norm * correction
        if self._reads_late:
            self._unread = (step, (~measured.norm.isfinite()).double())
        else:
            norm = float(norm)
            if not self._scaler.is_enabled() and self._is_bad(norm):
                self._policy.meet_gradients(step, self._gradients.named())
                return "non-finite", norm
        measured.scale(self._factor(norm, correction))
        alike = updating_alike(self._optimizer) if self._mesh.is_spread else nullcontext()
        with named_if_it_fails(self._optimizer, self._parallel.sharded_by), alike:
            is_updated = self._scaler.step_and_update(self._optimizer)
        if is_updated:
            return "updated", norm
        if self._scaler.get_scale() < _LEAST_LOSS_SCALE:
            raise NonFiniteLossError(
                f"step {step}: gradients overflow even at a loss scale of {self._scaler.get_scale():.1e}, so they are "
                "not finite at any scale; look for a division by zero or a root of zero in the model, or use "
                "precision.dtype='bf16'"
            )
        return "overflow", norm

    def _is_bad(self, norm: float) -> bool:
        """Return whether the norm is not finite on any rank; all share one norm, unless they train apart."""
        bad = not math.isfinite(norm)
        if not self._parallel.trains_alone and self._mesh.learners == 1:
            return bad
        flag = torch.tensor([float(bad)], device=self._world.device)
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag.item())

    def _factor(self, norm: float | torch.Tensor, correction: float) -> float | torch.Tensor:
        """Factor that turns the gradients into those of the mean, no longer than ``clip_norm``."""
        limit = self._config.clip_norm
        if limit is None:
            return correction
        if isinstance(norm, float):
            return correction * min(1.0, limit / (norm + 1e-6))
        clipped = correction * (limit / (norm + 1e-6)).clamp(max=1.0)
        # Zero leaves only those weights not finite whose gradients were not: these are named.
        return torch.where(norm.isfinite(), clipped, 0.0)
