"""Experts spread over ranks: rows travel to the rank that holds their expert, and back (Lepikhin et al. 2021).

A module with ``num_experts`` and ``exchange`` has experts: the first dimension of its parameters counts them. Each of n
ranks keeps consecutive ones, as DTensors, and ``exchange`` becomes an ``ExpertExchange``, by which forward reaches
the others. A module that counts something over a step has ``forget_step()``, called before each step, and
``after_update(add_up)``, called after each update with a function that sums a tensor over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard

from ..errors import TrainerConfigError
from ..ranks.mesh import Mesh

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
    """The ranks of ``group``, which hold equal numbers of consecutive experts; its methods are collectives.

    Gradients of weights come out divided by the number of these ranks, whose tokens all came here: averaged over those
    that hold the same experts, as other gradients are over all, they are those of the mean over all.
    """

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
        arrived = _Exchange.apply(rows, sent, received, float(self.ranks), self.group)  # type: ignore[no-untyped-call]
        # Rows come ordered by sender, and of each by expert.
        experts = torch.arange(len(counts) // self.ranks, device=rows.device).repeat(self.ranks)
        order = torch.repeat_interleave(experts, ours, output_size=sum(received)).argsort(stable=True)
        return arrived[order], ours.view(self.ranks, -1).sum(0), Journey(sent, received, order)

    def send_back(self, rows: Tensor, journey: Journey) -> Tensor:
        """The results of the rows that this rank sent, in the order in which it sent them."""
        by_sender = torch.empty_like(rows).index_copy(0, journey.order, rows)
        returned: Tensor = _Exchange.apply(  # type: ignore[no-untyped-call]
            by_sender, journey.received, journey.sent, 1.0 / self.ranks, self.group
        )
        return returned


class _Exchange(torch.autograd.Function):
    """Exchange of rows with all ranks of a group; gradients travel the other way, and are multiplied by ``factor``."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], factor: float, group: ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.factor, ctx.group = sent, received, factor, group
        return _exchange(rows, sent, received, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        back = _exchange(gradient, ctx.received, ctx.sent, ctx.group)
        return back.mul_(ctx.factor), None, None, None, None


def _exchange(rows: Tensor, sent: list[int], received: list[int], group: ProcessGroup) -> Tensor:
    arrived = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=group)
    return arrived


def check_experts(model: nn.Module, ranks: int) -> None:
    """Refuse to spread a model's experts over ``ranks``.

    Raises:
        TrainerConfigError: there are none, or the ranks do not divide them.
    """
    found = [(name, one) for name, one in model.named_modules() if _has_experts(one)]
    if not found:
        raise TrainerConfigError(
            f"parallel.ep={ranks} spreads experts, and model={type(model).__name__} has none (modules with num_experts "
            "and exchange, as the llama recipe's with experts); leave parallel.ep out"
        )
    for name, module in found:
        if module.num_experts % ranks:
            raise TrainerConfigError(
                f"parallel.ep={ranks} does not divide the {module.num_experts} experts of {name!r}; use a divisor"
            )


def spread_experts(modules: Iterable[nn.Module], mesh: Mesh) -> None:
    """Leave each rank its part of the experts among ``modules``, which all ranks have whole."""
    assert mesh.expert_mesh is not None, "ep is more than 1"
    ranks, exchange = mesh.sizes.ep, ExpertExchange(mesh.expert_mesh.get_group())
    spread: list[Any] = [one for one in modules if _has_experts(one)]
    for module in spread:
        for key, parameter in list(module.named_parameters()):
            own = parameter.detach().chunk(ranks)[exchange.rank].clone()
            cut = DTensor.from_local(own, mesh.expert_mesh, [Shard(0)], run_check=False)
            module.register_parameter(key, nn.Parameter(cut, requires_grad=parameter.requires_grad))
        module.exchange = exchange


def list_spread(model: nn.Module) -> Iterator[nn.Module]:
    """The modules whose experts are spread over ranks."""
    return (module for module in model.modules() if isinstance(getattr(module, "exchange", None), ExpertExchange))


def shard_experts(module: nn.Module, mesh: Mesh, arguments: Mapping[str, Any]) -> None:
    """Shard experts over the ranks that hold the same; ``arguments`` are those of ``fully_shard`` for other modules."""
    assert mesh.expert_replicas is not None, "experts are spread"
    ranks = mesh.expert_replicas.size()
    # By experts a rank could be left without any; by outputs all ranks have as much.
    evenly = all(one.shape[1] % ranks == 0 for one in module.parameters())
    fully_shard(
        module,
        **{**arguments, "mesh": mesh.expert_replicas},
        shard_placement_fn=lambda parameter: Shard(1) if evenly else Shard(0),
    )


def _has_experts(module: nn.Module) -> bool:
    return hasattr(module, "num_experts") and hasattr(module, "exchange")
