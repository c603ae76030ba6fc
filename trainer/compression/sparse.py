"""Top-k: each rank sends the few largest elements, and keeps the rest for later."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .dense import GradFuture, chain, copy_parts
from .memory import GradientMemory
from .wire import WireCounter, all_gather_flat, ring_bytes

_FIRST_DENSITY = 0.25


def density_at(step: int, density: float, warmup_steps: int) -> float:
    """The share that is sent at a step: it falls exponentially from 25% to ``density`` over the warm-up."""
    if step >= warmup_steps or density >= _FIRST_DENSITY:
        return density
    return math.exp(math.log(_FIRST_DENSITY) + math.log(density / _FIRST_DENSITY) * step / warmup_steps)


class TopKHook:
    """Deep gradient compression (Lin et al. 2018): top-k with error feedback and momentum correction (section 3).

    Each rank keeps a velocity u = m u + g and what it has not sent yet v = v + u; the largest |v| of the bucket are
    sent, and both are cleared there (momentum factor masking). An element costs 8 bytes: value and index. The
    all-gather overlaps with backward.
    """

    def __init__(
        self,
        *,
        density: float,
        momentum: float,
        warmup_steps: int,
        group: dist.ProcessGroup,
        wire: WireCounter,
        memory: GradientMemory,
    ) -> None:
        self.steps = 0
        self._density, self._momentum, self._warmup_steps = density, momentum, warmup_steps
        self._group, self._wire, self._memory = group, wire, memory

    def __call__(self, bucket: GradBucket) -> GradFuture:
        buffer, gradients, parameters = bucket.buffer(), bucket.gradients(), bucket.parameters()
        ranks = self._group.size()
        unsent = self._memory.like("topk.unsent", parameters, gradients)
        if self._momentum:
            velocity = self._memory.like("topk.velocity", parameters, gradients)
            torch._foreach_mul_(velocity, self._momentum)
            torch._foreach_add_(velocity, gradients)
            torch._foreach_add_(unsent, velocity)
        else:
            velocity = []
            torch._foreach_add_(unsent, gradients)
        flat = torch.cat([one.reshape(-1) for one in unsent])
        count = max(1, math.ceil(flat.numel() * density_at(self.steps, self._density, self._warmup_steps)))
        indices = flat.abs().topk(count, sorted=False).indices
        packed = torch.cat([flat[indices].float().view(torch.uint8), indices.to(torch.int32).view(torch.uint8)])
        kept = torch.ones_like(flat)
        kept[indices] = 0
        copy_parts(unsent, gradients, flat * kept)
        if velocity:
            speed = torch.cat([one.reshape(-1) for one in velocity])
            copy_parts(velocity, gradients, speed * kept)

        everyone = torch.empty((ranks, packed.numel()), dtype=torch.uint8, device=buffer.device)
        self._wire.wire_bytes += (ranks - 1) * packed.nbytes
        self._wire.plain_bytes += ring_bytes(buffer.nbytes, ranks)

        def spread(_: object) -> Tensor:
            values = everyone[:, : 4 * count].contiguous().view(torch.float32).reshape(-1)
            places = everyone[:, 4 * count :].contiguous().view(torch.int32).reshape(-1)
            return buffer.zero_().index_add_(0, places, (values / ranks).to(buffer.dtype))

        return chain(all_gather_flat(everyone, packed, self._group, async_op=True), spread)
