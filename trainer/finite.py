"""What is not finite: one flag for many tensors without waiting for the device, and names once something is wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .errors import NonFiniteLossError
from .ranks.world import World


def any_not_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return (1,) float64 on ``device``: 1 where an element of this rank's parts is NaN or infinite, else 0.

    Reads each element once and writes none; the caller decides when to wait for the result.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        values = _values(tensor)
        if values.numel() and values.is_floating_point():
            by_device.setdefault(values.device, []).append(values)
    flag = torch.zeros(1, dtype=torch.float64, device=device)
    for same_device in by_device.values():
        # The largest magnitude of each: NaN and infinity come through, and nothing else overflows.
        largest = torch._foreach_norm(same_device, float("inf"))
        found = torch.stack([one.float() for one in largest]).isfinite().all()
        flag += (~found).to(device)
    return flag.clamp_(max=1.0)


def name_not_finite(named: Iterable[tuple[str, Tensor]], *, at_most: int = 5) -> list[str]:
    """Return the names of the first few tensors that are not finite; waits for the device."""
    names: list[str] = []
    for name, tensor in named:
        if not bool(torch.isfinite(_values(tensor)).all()):
            names.append(name)
            if len(names) == at_most:
                break
    return names


def name_on_all_ranks(named: Iterable[tuple[str, Tensor]], world: World) -> str:
    """Return the first few names of what is not finite on any rank, joined by commas; a collective."""
    found = name_not_finite(named)
    everywhere = [found]
    if world.world_size > 1:
        everywhere = [[] for _ in range(world.world_size)]
        dist.all_gather_object(everywhere, found)
    return ", ".join(dict.fromkeys(name for names in everywhere for name in names))


def refuse_weights(model: nn.Module, step: int, world: World, averages: Mapping[str, Tensor] | None = None) -> None:
    """Raise a NonFiniteLossError, on every rank, where a weight or an average is not finite on any; a collective."""
    named: list[tuple[str, Tensor]] = list(model.named_parameters())
    named += [(f"{name} (its average)", average) for name, average in (averages or {}).items()]
    bad = any_not_finite((parameter for _, parameter in named), world.device)
    if world.world_size > 1:
        dist.all_reduce(bad, dist.ReduceOp.MAX)
    if bad.item():
        raise NonFiniteLossError(
            f"step {step}: the weights {name_on_all_ranks(named, world)} are not finite and are not saved; the "
            "checkpoints before this one stay. Lower the rate, or set step.clip_norm, and resume"
        )


def _values(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local._values() if local.is_sparse else local
