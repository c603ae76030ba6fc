"""DDP's buckets, laid out once for good before the first step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

_LEAST_MB = 1.0  # below this, what a collective costs by itself outweighs what it hides
_BUCKETS = 4


def choose_bucket_mb(whole_mb: float, largest_mb: float) -> float:
    """The size of buckets, in MiB, for ``whole_mb`` of gradients: a quarter, from 1 MiB to ``largest_mb``.

    A bucket is exchanged while backward runs, except for the last, which everything waits for. A model that fits into
    one bucket would hide nothing.
    """
    return min(largest_mb, max(_LEAST_MB, whole_mb / _BUCKETS))


class _SumOfParameters(nn.Module):
    """Stands in for the model: every parameter gets a gradient of zeros, the last parameter first."""

    def __init__(self, parameters: Sequence[nn.Parameter], sparse: Collection[Tensor]) -> None:
        super().__init__()
        self._listed = tuple(parameters)  # in a tuple, so that they are not registered again
        self._sparse = {id(parameter) for parameter in sparse}
        self.first_row = torch.zeros(1, dtype=torch.int64, device=self._listed[0].device)

    def forward(self, first_row: Tensor) -> Tensor:
        total = torch.zeros((), device=self._listed[0].device)
        for parameter in self._listed:
            # One element keeps the sum small; nodes made later run earlier in backward.
            if id(parameter) in self._sparse:
                part = nn.functional.embedding(first_row, parameter, sparse=True)
            else:
                part = parameter.reshape(-1)[:1]
            part = torch.view_as_real(part) if part.is_complex() else part
            total = total + 0.0 * part.sum().to(total.dtype)
        return total


def settle_buckets(model: DistributedDataParallel, sparse: Collection[Tensor] = ()) -> None:
    """Have DDP lay out its buckets now, in reverse order of the parameters; a collective.

    ``sparse`` are the parameters whose gradients are sparse tensors.

    DDP regroups its buckets after its first backward pass, by the order in which gradients arrived. Where an element
    lies in a bucket decides in which order a ring adds up the ranks' values, so on three ranks or more a run that
    starts or resumes here would otherwise take its first step with other rounding than an unbroken run. Gradients,
    weights, buffers and random numbers stay as they are.
    """
    bare = cast(nn.Module, model.module)
    trained = [parameter for parameter in bare.parameters() if parameter.requires_grad]
    shares_buffers, model.broadcast_buffers = model.broadcast_buffers, False  # the stand-in has none
    model.module = stand_in = _SumOfParameters(trained, sparse)
    try:
        with _without_hooks(trained):
            # DDP with device_ids, as on CUDA, cannot call a module without inputs (pytorch/pytorch#37814).
            model(stand_in.first_row).backward()
            # DDP regroups at the beginning of the next forward. Without a backward after it DDP would keep waiting,
            # and exchange the gradients of a first microbatch that belongs to no_sync.
            model(stand_in.first_row).backward()
    finally:
        model.module = bare
        model.broadcast_buffers = shares_buffers
    for parameter in trained:
        parameter.grad = None


@contextmanager
def _without_hooks(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Call no hook that was registered on a parameter: it waits for gradients of losses, and may update weights."""
    held = [hooks for one in parameters for hooks in (one._backward_hooks, one._post_accumulate_grad_hooks) if hooks]
    kept = [dict(hooks) for hooks in held]
    for hooks in held:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, own in zip(held, kept, strict=True):
            hooks.update(own)
