"""Forward and backward of batches through a pipeline: the other way, beside ``PlainPasses``, to run a model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from ..model import ParallelModel
from ..passes import Found, Loss, LossAccount
from ..precision import PrecisionConfig, compute_context
from .pipeline import Pipeline


class PipelinePasses:
    """Runs each batch in parts through the stages; gradients are exchanged after the last batch of a step.

    Where weights are sharded, those of a stage are gathered when it runs first in a step, and stay whole until its last
    gradient is there: stages of other replicas may be at other parts. Mutable state: that of the pipeline, whether a
    step's first forward is to come, and all ranks' seconds in schedules, and of computing there, since the last record.
    """

    knows_losses_first: ClassVar[bool] = False

    def __init__(
        self,
        pipeline: Pipeline,
        parallel: ParallelModel,
        precision: PrecisionConfig,
        phase: Callable[[str], AbstractContextManager[Any]],
    ) -> None:
        self._pipeline = pipeline
        self._parallel = parallel
        self._precision = precision
        self._phase = phase
        self._is_first = True
        self._scheduled = self._computed = 0.0
        self._roots = [one for one in parallel.inner.modules() if isinstance(one, FSDPModule)][:1]
        for root in self._roots:
            root.set_reshard_after_forward(False)

    def train(self, batch: Any, loss: Loss, account: LossAccount, *, last: bool) -> None:
        parts = self._pipeline.cut_batch(batch)
        for root in self._roots:
            root.set_is_last_backward(False)
            root.set_reshard_after_backward(False)
            root.set_requires_gradient_sync(False)

        def programme(model: nn.Module, part: Any) -> Any:
            with self._computes(model):
                return loss(model, part)

        def found(part: int, returned: tuple[Tensor, Tensor | float]) -> Tensor:
            account.add(*returned)
            return returned[0]

        with self._phase("pipeline"):
            self._pipeline.train(
                parts,
                programme,
                self._parallel.module,
                found=found,
                weigh=account.weigh,
                forward=self._forward,
                backward=self._backward,
            )
        account.end()
        if last:
            self._is_first = True
            with self._phase("exchange"):
                self._exchange()

    def measure(self, batch: Any, metrics: Callable[[nn.Module, Any], Found]) -> Found | None:
        def programme(model: nn.Module, part: Any) -> Any:
            with self._computes(model):
                return metrics(model, part)

        found: Found | None = self._pipeline.measure(batch, programme, self._parallel.module)
        return found

    def take_times(self) -> tuple[float, float]:
        return self._pipeline.take_times()

    def add_times(self, scheduled: float, computed: float) -> None:
        self._scheduled += scheduled
        self._computed += computed

    def describe(self) -> dict[str, float]:
        """The mean bubble of all ranks as measured since the last call, and that of the schedule's arithmetic."""
        scheduled, computed = self._scheduled, self._computed
        self._scheduled = self._computed = 0.0
        if not scheduled:
            return {}
        return {"bubble": 1.0 - computed / scheduled, "bubble_formula": self._pipeline.formula}

    def _computes(self, model: nn.Module) -> AbstractContextManager[None]:
        return compute_context(self._precision, self._parallel.world.device, model)

    def _forward(self) -> AbstractContextManager[Any]:
        # Replicas may have batches of fewer parts; a step's first forward is that of the same modules on all of them.
        is_first, self._is_first = self._is_first, False
        return self._parallel.watched_forward() if is_first else nullcontext()

    def _backward(self) -> AbstractContextManager[Any]:
        return self._parallel.watched_backward()

    @torch.no_grad()
    def _exchange(self) -> None:
        for root in self._roots:
            _reduce(root)
        self._parallel.exchange_now()
        self._pipeline.exchange_ties()


def list_groups(state: Any) -> list[Any]:
    """The groups of parameters that FSDP2 gathers together for a module, of which torch 2.11 has at most one."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def _reduce(root: FSDPModule) -> None:
    """Reduce the gradients that backwards have left whole, as ``torch.distributed.pipelining`` does it."""
    root.set_is_last_backward(True)
    root.set_reshard_after_backward(True)
    root.set_requires_gradient_sync(True)
    state = root._get_fsdp_state()
    for one in state._state_ctx.all_states:
        for group in list_groups(one):
            group.post_backward()
    state._root_post_backward_final_callback()
