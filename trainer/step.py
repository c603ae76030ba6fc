"""One update: forward and backward over the microbatches, exact normalisation, clipping, the optimizer's step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .batches import count_rows, sample_ids
from .computing import ComputeClock
from .errors import NonFiniteLossError, TrainerConfigError
from .finite import any_not_finite, name_on_all_ranks
from .options import check_choice, check_range
from .parallel.limits import named_if_it_fails
from .parallel.model import ParallelModel
from .parallel.precision import LossScaler, PrecisionConfig, compute_context, local_part

# fp16's loss scale starts at 2**16 and halves at each overflow; gradients that overflow even here are not finite.
_LEAST_LOSS_SCALE = 2.0**-24

LossFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]
Phase = Callable[[str], AbstractContextManager[Any]]
Outcome = Literal["updated", "overflow", "non-finite", "empty"]


@dataclass(frozen=True, kw_only=True)
class StepConfig:
    """What one update consists of."""

    accumulate: int = 1
    """Microbatches of each rank in one update."""

    clip_norm: float | None = None
    """Largest global norm of the gradients."""

    on_nan: Literal["stop", "skip", "rewind"] = "stop"
    """Stop at a loss or gradient that is NaN or infinite, skip the update, or rewind as for a loss spike."""

    max_skipped: int = 10
    """With on_nan=skip or rewind, stop after more skipped updates than this."""

    def __post_init__(self) -> None:
        check_range("step.accumulate", self.accumulate, low=1)
        check_range("step.clip_norm", self.clip_norm, low=0.0, above=True)
        check_choice("step.on_nan", self.on_nan, ("stop", "skip", "rewind"))
        check_range("step.max_skipped", self.max_skipped, low=0)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step did, the same on every rank: mean loss over ``count`` samples or tokens of ``rows`` rows."""

    loss: float
    count: float
    rows: int
    gradient_norm: float | None
    outcome: Outcome
    stop_requested: bool


class StepRunner:
    """Runs steps of one model; its state is the last global count, the skipped steps so far, and the loss scale.

    The loss is a sum; the update uses the gradient of its mean over all ranks and microbatches. The global count is
    known only after the last forward, so the loss is scaled by ``ranks / expected count``, where the expected count is
    the previous step's, the same on every rank, and the reduced gradients are corrected by the ratio of the two.
    Batches of equal counts, the common case, need no correction. Ranks that exchange no gradients each use their own
    mean.
    """

    def __init__(
        self,
        parallel: ParallelModel,
        optimizer: torch.optim.Optimizer,
        loss: LossFunction,
        *,
        config: StepConfig,
        precision: PrecisionConfig,
        phase: Phase,
        clock: ComputeClock | None = None,
    ) -> None:
        self._parallel = parallel
        self._world = parallel.world
        self._optimizer = optimizer
        self._loss = loss
        self._config = config
        self._precision = precision
        self._phase = phase
        self._computing: Callable[[], AbstractContextManager[Any]] = nullcontext if clock is None else clock.computing
        self._scaler = LossScaler(precision, self._world)
        self._expected_count: float | None = None
        self._skipped = 0
        self.last_problem = ""

    @property
    def loss_scale(self) -> float | None:
        """The current factor on the loss for fp16; None otherwise."""
        return float(self._scaler.get_scale()) if self._scaler.is_enabled() else None

    def state_dict(self) -> dict[str, Any]:
        """JSON, and the same for any number of ranks."""
        return {
            "expected_count": self._expected_count,
            "skipped": self._skipped,
            "scaler": self._scaler.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._expected_count = state["expected_count"]
        self._skipped = state["skipped"]
        if self._scaler.is_enabled() and state["scaler"]:
            self._scaler.load_state_dict(state["scaler"])

    def run(self, step: int, microbatches: Sequence[Any], *, stop_requested: bool = False) -> StepResult:
        """Forward and backward of this rank's microbatches, then the update; a collective over all ranks.

        A step that is skipped leaves no trace: weights, optimizer, buffers and the expected count are as before it.

        Raises:
            NonFiniteLossError: on every rank alike, before the weights are touched.
        """
        self._parallel.begin_step()
        buffers, expected_before = self._copy_buffers(), self._expected_count
        # float64: sum of losses, count, rows, non-finite losses, requests to stop, and two for the order of modules.
        totals = torch.zeros(7, dtype=torch.float64, device=self._world.device)
        totals[4] = stop_requested
        own_count = totals[1]
        exchange: dist.Work | None = None
        suspects: list[Any] = []
        for index, batch in enumerate(microbatches):
            last = index == len(microbatches) - 1
            with self._parallel.exchange_when(last=last):
                with self._phase("forward"), self._parallel.watched_forward(), self._computing():
                    loss_sum, count = self._forward(batch)
                finite = torch.isfinite(loss_sum.detach())
                totals[0] += loss_sum.detach()
                totals[1] += count
                totals[2] += count_rows(batch)
                totals[3] += ~finite
                suspects.append(finite)
                if self._expected_count is None:
                    self._expected_count = self._expect(totals[1]) * len(microbatches)
                if last and self._world.world_size > 1:
                    own_count = totals[1].clone()
                    totals[5], totals[6] = self._parallel.order_marks()
                    exchange = dist.all_reduce(totals, async_op=True)
                with self._phase("backward"), self._computing():
                    scale = self._world.world_size / self._expected_count
                    self._scaler.scale(loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        self._parallel.check_gradients()
        if exchange is not None:
            with self._phase("reduce"):
                exchange.wait()
        # One wait for the device, for all that must be known before the update.
        values = torch.cat((totals, self._check_gradients())).tolist()
        loss_total, count_total, rows, bad, stop, order, squares, bad_gradients, *used = values
        self._parallel.check_order(order, squares)
        self._parallel.drop_unused(used)
        norm: float | None = None
        outcome: Outcome
        if bad:
            self._refuse_or_skip(step, microbatches, suspects)
            outcome = "non-finite"
        elif bad_gradients:
            self._refuse_gradients(step)
            outcome = "non-finite"
        elif not count_total:
            outcome = "empty"
        else:
            with self._phase("optimizer"):
                assert self._expected_count is not None, "there was a microbatch"
                right = count_total if self._parallel.exchanges else float(own_count) * self._world.world_size
                outcome, norm = self._update(step, self._expected_count / right if right else 1.0)
            self._expected_count = count_total
        if outcome == "non-finite":
            self._expected_count = expected_before
            for buffer, kept in buffers:
                buffer.copy_(kept)
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(
            loss=loss_total / count_total if count_total else math.nan,
            count=count_total,
            rows=int(rows),
            gradient_norm=norm,
            outcome=outcome,
            stop_requested=stop > 0,
        )

    def _copy_buffers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """The buffers with copies, where a step may be skipped: a batch norm has then seen what is not finite."""
        if self._config.on_nan == "stop":
            return []
        return [(buffer, buffer.detach().clone()) for buffer in self._parallel.inner.buffers()]

    def _check_gradients(self) -> torch.Tensor:
        """(1 + n,) float64, the same on every rank: 1 where a gradient is not finite; n sharded parameters' use.

        fp16's scaler looks for itself.
        """
        device = self._world.device
        if self._scaler.is_enabled():
            bad = torch.zeros(1, dtype=torch.float64, device=device)
        else:
            bad = any_not_finite((p.grad for _, p in self._trained() if p.grad is not None), device)
        found = torch.cat((bad, self._parallel.used_flags()))
        if self._world.world_size > 1 and (self._parallel.is_sharded or not self._parallel.exchanges):
            dist.all_reduce(found, dist.ReduceOp.MAX)
        return found

    def _trained(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        return ((name, one) for name, one in self._parallel.inner.named_parameters() if one.requires_grad)

    def _forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
        with compute_context(self._precision, self._world.device, sharded=self._parallel.is_sharded):
            return _check_loss(self._loss(self._parallel.module, batch))

    def _expect(self, count: torch.Tensor) -> float:
        known = count.clone()
        if self._world.world_size > 1:
            dist.all_reduce(known)
        return max(1.0, float(known))

    def _update(self, step: int, correction: float) -> tuple[Outcome, float | None]:
        norm: float | None = None
        factor = correction
        gradients = self._gather_gradients()
        if self._scaler.is_enabled():
            self._scaler.unscale_(self._optimizer)
        if self._config.clip_norm is not None:
            norm = global_norm(gradients) * correction
            if not math.isfinite(norm) and not self._scaler.is_enabled():
                self._count_skip(f"step {step}: the global norm of the gradients is {norm}")
                return "non-finite", norm
            factor *= min(1.0, self._config.clip_norm / (norm + 1e-6))
        if factor != 1.0:
            torch._foreach_mul_([local_part(gradient) for gradient in gradients], factor)
        with named_if_it_fails(self._optimizer, self._parallel.config.zero):
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

    def _gather_gradients(self) -> list[torch.Tensor]:
        found = []
        for group in self._optimizer.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    if one.grad.is_sparse:
                        one.grad = one.grad.coalesce()  # each element once: the norm is that of the sums
                    found.append(one.grad)
        return found

    def _refuse_gradients(self, step: int) -> None:
        gradients = ((name, one.grad) for name, one in self._trained() if one.grad is not None)
        names = name_on_all_ranks(gradients, self._world)
        self._count_skip(f"step {step}: the loss is finite and the gradient of {names} is not")

    def _refuse_or_skip(self, step: int, microbatches: Sequence[Any], suspects: Sequence[torch.Tensor]) -> None:
        found = [
            (self._world.rank, index, sample_ids(batch))
            for index, (batch, finite) in enumerate(zip(microbatches, suspects, strict=True))
            if not finite
        ]
        everywhere: list[list[tuple[int, int, list[int] | None]]] = [found]
        if self._world.world_size > 1:
            everywhere = [[] for _ in range(self._world.world_size)]
            dist.all_gather_object(everywhere, found)
        places = "; ".join(
            f"rank {rank}, microbatch {index}, "
            + ("sample ids unknown (with_ids=True adds them)" if ids is None else f"sample ids {ids}")
            for there in everywhere
            for rank, index, ids in there
        )
        self._count_skip(f"step {step}: the loss is not finite ({places})")

    def _count_skip(self, problem: str) -> None:
        if self._config.on_nan == "stop":
            raise NonFiniteLossError(
                f"{problem}; look at these samples, lower the rate, set step.clip_norm, or set step.on_nan='skip' "
                "to skip such steps"
            )
        self.last_problem = problem
        self._skipped += 1
        if self._skipped > self._config.max_skipped:
            raise NonFiniteLossError(
                f"{problem}; with it {self._skipped} steps were skipped, and step.max_skipped="
                f"{self._config.max_skipped}"
            )


def _check_loss(given: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The loss function's result, if it is a sum and a count."""
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TrainerConfigError(
            f"the loss function returned a {type(given).__name__}; it must return two values: the sum of the losses, "
            "and the count of samples or tokens in it"
        )
    total = given[0]
    if not (isinstance(total, torch.Tensor) and total.ndim == 0 and total.requires_grad):
        got = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            got = f"a tensor of shape {tuple(total.shape)}{'' if total.requires_grad else ' without a gradient'}"
        raise TrainerConfigError(
            f"the loss function returned {got} as the sum; it must be a tensor of shape () with a gradient, such as "
            "losses.sum()"
        )
    return given


def global_norm(gradients: Sequence[torch.Tensor]) -> float:
    """The Euclidean norm of all gradients as one vector, over all shards; a collective where they are sharded."""
    norm = torch.nn.utils.get_total_norm([one._values() if one.is_sparse else one for one in gradients])
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
