"""Weights that several stages have, as those of an embedding that are a head's, too: one weight, in as many copies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..precision import local_part
from .cut import Cut


@dataclass(frozen=True)
class Tie:
    """All names of one weight, the one that ``named_parameters`` gives it first, and the stages that have it."""

    names: tuple[str, ...]
    stages: tuple[int, ...]


def find_ties(model: nn.Module, cut: Cut) -> list[Tie]:
    """The weights of a whole model that several stages have."""
    names: dict[int, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(one), []).append(name)
    found = []
    for tied in names.values():
        stages = tuple(sorted({cut.parameters[name] for name in tied}))
        if len(stages) > 1:
            found.append(Tie(tuple(tied), stages))
    return found


@torch.no_grad()
def exchange_ties(
    model: nn.Module, ties: Sequence[Tie], rank_of: Sequence[int], rank: int, group: dist.ProcessGroup | None
) -> None:
    """Give the copies of each weight the sum of their gradients, added in one order on all ranks that have one."""
    own = dict(model.named_parameters(remove_duplicate=False)) if ties else {}
    for tie in ties:
        ranks = sorted({rank_of[stage] for stage in tie.stages})
        if rank not in ranks or len(ranks) == 1:
            continue
        weight = next(own[name] for name in tie.names if name in own)
        if not weight.requires_grad:
            continue
        part = local_part(weight)
        gradient = torch.zeros_like(part) if weight.grad is None else local_part(weight.grad)
        has = gradient.new_full((1,), float(weight.grad is not None))
        lines = _gather(torch.cat([gradient.reshape(-1), has]), ranks, rank, group)
        total = (
            torch.stack([lines[one] for one in ranks]).sum(0) if len(ranks) > 2 else lines[ranks[0]] + lines[ranks[1]]
        )
        if not float(total[-1]):
            continue
        if weight.grad is None:
            weight.grad = torch.zeros_like(weight)
        local_part(weight.grad).copy_(total[:-1].view_as(part))


def _gather(line: Tensor, ranks: Sequence[int], rank: int, group: dist.ProcessGroup | None) -> dict[int, Tensor]:
    lines = {rank: line}
    works = []
    for other in ranks:
        if other != rank:
            lines[other] = torch.empty_like(line)
            works.append(dist.P2POp(dist.isend, line, group=group, group_peer=other))
            works.append(dist.P2POp(dist.irecv, lines[other], group=group, group_peer=other))
    for work in dist.batch_isend_irecv(works):
        work.wait()
    return lines
