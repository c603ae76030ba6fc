"""Losses of one step: added up while its microbatches run, and weighed for backward before their count is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..data.batches import count_rows
from ..parallel.precision import LossScaler
from ..ranks.mesh import Mesh
from .totals import StepTotals


class StepLosses:
    """Takes the losses of a step's ``number`` microbatches; a ``LossAccount``. Each step has its own.

    ``expected_count`` is that of all ranks, by which losses are weighed; where it is None it becomes that of the first
    losses, times ``number``, or, where these come after the first backward, that of the first rows. ``exchange`` is
    called once all losses of the step are added.
    """

    def __init__(
        self,
        mesh: Mesh,
        number: int,
        *,
        expected_count: float | None,
        knows_losses_first: bool,
        scaler: LossScaler,
        exchange: Callable[[], None],
    ) -> None:
        self.sums = StepTotals(mesh)
        self.expected_count = expected_count
        self.by_microbatch: list[Tensor] = []
        """() each, detached: those that came to be on this rank; zero where none did."""
        self._mesh = mesh
        self._number = number
        self._knows_losses_first = knows_losses_first
        self._scaler = scaler
        self._exchange = exchange
        self._batch: Any = None
        self._parts: list[Tensor] = []

    def begin(self, batch: Any) -> None:
        """Begin a microbatch; a collective in the first step of a run whose losses are not known first."""
        self._batch, self._parts = batch, []
        if self.expected_count is None and not self._knows_losses_first:
            rows = torch.as_tensor(count_rows(batch), dtype=torch.float64, device=self._mesh.world.device)
            self._expect(rows if self._mesh.counts_rows else torch.zeros_like(rows))

    def add(self, loss: Tensor, count: Tensor | float) -> None:
        self._parts.append(loss.detach())
        self.sums.add(self._parts[-1], count)
        if self.expected_count is None:
            self._expect(self.sums.own_count())

    def end(self) -> None:
        self.sums.add_rows(count_rows(self._batch))
        first, *others = self._parts or [torch.zeros((), device=self._mesh.world.device)]
        self.by_microbatch.append(sum(others, start=first))
        if len(self.by_microbatch) == self._number:
            self._exchange()

    def weigh(self, loss: Tensor) -> Tensor:
        assert self.expected_count is not None, "the loss was added"
        ranks = self._mesh.gradient_ranks * self._mesh.learners
        return self._scaler.scale(loss * (ranks / self.expected_count))

    def _expect(self, count: Tensor) -> None:
        known = count.clone()
        if self._mesh.world.world_size > 1:
            dist.all_reduce(known)
        self.expected_count = max(1.0, float(known)) * self._number
