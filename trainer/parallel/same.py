"""Check that all ranks were given the same model: engines pair parameters by order, and would mix up others."""

from __future__ import annotations

import hashlib

import torch.distributed as dist
from torch import nn

from ..errors import TrainerConfigError
from ..ranks.world import World


def check_same_model(model: nn.Module, world: World) -> None:
    """Compare names, order, shapes and formats of all parameters and buffers; a collective.

    Raises:
        TrainerConfigError: on every rank, if a rank's differ from rank 0's; it names the first that does.
    """
    if world.world_size == 1:
        return
    own = _describe(model)
    digest = hashlib.sha256("\n".join(own).encode()).hexdigest()
    digests = [""] * world.world_size
    dist.all_gather_object(digests, digest)
    other = next((rank for rank, its in enumerate(digests) if its != digests[0]), None)
    if other is None:
        return
    everywhere: list[list[str]] = [[] for _ in range(world.world_size)]
    dist.all_gather_object(everywhere, own)
    first, second = everywhere[0], everywhere[other]
    at = next((i for i, (one, its) in enumerate(zip(first, second, strict=False)) if one != its), None)
    at = min(len(first), len(second)) if at is None else at
    here, there = (lines[at] if at < len(lines) else "nothing more" for lines in (first, second))
    raise TrainerConfigError(
        f"model={type(model).__name__} is not the same on all ranks: in order of parameters and buffers, rank 0 has "
        f"{here} where rank {other} has {there}; build the same model on every rank"
    )


def _describe(model: nn.Module) -> list[str]:
    """A line for each parameter and buffer, tied ones under each of their names, in their order."""
    tied: dict[nn.Parameter, str] = {}
    lines = []
    for name, one in model.named_parameters(remove_duplicate=False):
        first = tied.setdefault(one, name)
        trained = "" if one.requires_grad else ", frozen"
        lines.append(f"parameter {name!r} of {one.dtype}, shape {tuple(one.shape)}{trained}")
        if first != name:
            lines[-1] += f", tied to {first!r}"
    for name, buffer in model.named_buffers():
        lines.append(f"buffer {name!r} of {buffer.dtype}, shape {tuple(buffer.shape)}")
    return lines
