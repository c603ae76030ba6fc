"""Experts spread over ranks: rows travel to the rank that holds their expert, and back (Lepikhin et al. 2021)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Journey:
    """The way of rows to this rank, by which results go back."""

    sent: list[int]
    """Rows that this rank sent to each."""

    received: list[int]
    """Rows that each sent to this rank."""

    order: Tensor
    """(rows received,) int64: their places when they are ordered by expert."""


class ExpertExchange:
    """The ranks of ``group``, which hold equal numbers of consecutive experts; its methods are collectives."""

    def __init__(self, group: ProcessGroup) -> None:
        self.group = group
        self.ranks = dist.get_world_size(group)
        self.rank = dist.get_rank(group)

    def send(self, rows: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Journey]:
        """Send rows to their experts.

        Args:
            rows: (N, width), ordered by expert.
            counts: (experts,) int64, how many rows are for each.

        Returns:
            The rows for this rank's experts, ordered by expert, how many are for each, and their journey.
        """
        ours = torch.empty_like(counts)
        dist.all_to_all_single(ours, counts.contiguous(), group=self.group)
        by_rank = torch.stack([counts.view(self.ranks, -1).sum(1), ours.view(self.ranks, -1).sum(1)]).tolist()
        sent, received = by_rank
        arrived = _Exchange.apply(rows, sent, received, self.group)
        # Rows come ordered by sender, and of each by expert.
        experts = torch.arange(len(counts) // self.ranks, device=rows.device).repeat(self.ranks)
        order = torch.repeat_interleave(experts, ours, output_size=sum(received)).argsort(stable=True)
        return arrived[order], ours.view(self.ranks, -1).sum(0), Journey(sent, received, order)

    def send_back(self, rows: Tensor, journey: Journey) -> Tensor:
        """The results of the rows that this rank sent, in the order in which it sent them."""
        by_sender = torch.empty_like(rows).index_copy(0, journey.order, rows)
        returned: Tensor = _Exchange.apply(by_sender, journey.received, journey.sent, self.group)
        return returned


class _Exchange(torch.autograd.Function):
    """Exchange of rows with all ranks of a group; gradients travel the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(gradient, ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived
