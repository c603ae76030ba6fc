"""Forward and backward of one batch: the one thing that a pipeline does in another way than everything else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, Protocol, TypeVar

import torch
from torch import nn

from .model import ParallelModel
from .precision import PrecisionConfig, compute_context

Found = TypeVar("Found")
Loss = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]
"""(model, batch) -> the sum of the losses, () with a gradient, and their count; its results are checked."""


class LossAccount(Protocol):
    """Takes the losses of a batch as they come to be known, and says what to run backward from."""

    def add(self, loss: torch.Tensor, count: torch.Tensor | float) -> None:
        """Take the sum of the losses of the batch, or of a part of it, and their count."""

    def end(self) -> None:
        """Hear that all losses of the batch are added; called once a batch, as early as that is so."""

    def weigh(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to run backward from, whose gradients need only be averaged over the gradient group."""


class Passes(Protocol):
    """Runs forward and backward of batches over all ranks of a replica; a collective of these.

    ``knows_losses_first`` says that all losses of a batch are known before its first backward begins: ``end`` is then
    called before any ``weigh``.
    """

    knows_losses_first: ClassVar[bool]

    def train(self, batch: Any, loss: Loss, account: LossAccount, *, last: bool) -> None:
        """Add the gradients of the batch to those there are; after the ``last`` of a step they are exchanged.

        ``account`` hears of losses on the ranks where they come to be (of a pipeline, on the last stage), and of their
        end on every rank.
        """

    def measure(self, batch: Any, metrics: Callable[[nn.Module, Any], Found]) -> Found | None:
        """Return the results of ``metrics`` for model and batch, forward only; None on ranks that do not know them."""

    def take_times(self) -> tuple[float, float]:
        """Seconds of this rank's schedules that are over since the last call, and those in which it computed."""

    def add_times(self, scheduled: float, computed: float) -> None:
        """Hear the sums of these over all ranks, once a step."""

    def describe(self) -> dict[str, float]:
        """Numbers for the record of the steps since the last call, by name."""


class PlainPasses:
    """Each rank runs the whole model, or its cut of each layer: forward, then backward. Holds no state."""

    knows_losses_first: ClassVar[bool] = True

    def __init__(
        self,
        parallel: ParallelModel,
        precision: PrecisionConfig,
        phase: Callable[[str], AbstractContextManager[Any]],
        computing: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._parallel = parallel
        self._precision = precision
        self._phase = phase
        self._computing = computing

    def train(self, batch: Any, loss: Loss, account: LossAccount, *, last: bool) -> None:
        parallel = self._parallel
        with parallel.exchange_when(last=last):
            with self._phase("forward"), parallel.watched_forward(), self._computing(), self._computes():
                found, count = loss(parallel.module, batch)
            account.add(found, count)
            account.end()
            with self._phase("backward"), parallel.watched_backward(), self._computing():
                account.weigh(found).backward()  # type: ignore[no-untyped-call]

    def measure(self, batch: Any, metrics: Callable[[nn.Module, Any], Found]) -> Found | None:
        parallel = self._parallel
        with self._computes():
            return metrics(parallel.module if parallel.is_sharded else parallel.inner, batch)

    def take_times(self) -> tuple[float, float]:
        return 0.0, 0.0

    def add_times(self, scheduled: float, computed: float) -> None:
        pass

    def describe(self) -> dict[str, float]:
        return {}

    def _computes(self) -> AbstractContextManager[None]:
        return compute_context(self._precision, self._parallel.world.device, self._parallel.inner)
