"""Whether tensors are finite: one flag for many of them, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


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


def list_names(ranks: Sequence[Sequence[str]]) -> str:
    """Join what several ranks found, each name once."""
    return ", ".join(dict.fromkeys(name for names in ranks for name in names))


def _values(tensor: Tensor) -> Tensor:
    local = tensor.detach()
    if isinstance(local, DTensor):
        local = local.to_local()
    return local._values() if local.is_sparse else local
