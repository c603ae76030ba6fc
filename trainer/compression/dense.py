"""Schemes that send every element, with fewer bits: casts, and int8 with error feedback."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from .memory import GradientMemory
from .wire import WireCounter, all_gather_flat, ring_bytes

CAST_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
INT8_BLOCK = 2048
"""Elements that share one fp32 scale: 0.2% on top of the int8 bytes."""

GradFuture = torch.futures.Future[Tensor]


class CastHook:
    """Averages gradients in half as many bits; the all-reduce overlaps with backward."""

    def __init__(self, scheme: Literal["bf16", "fp16"], group: dist.ProcessGroup, wire: WireCounter) -> None:
        self._dtype, self._group, self._wire = CAST_TYPES[scheme], group, wire

    def __call__(self, bucket: GradBucket) -> GradFuture:
        buffer = bucket.buffer()
        ranks = self._group.size()
        small = buffer.to(self._dtype).div_(ranks)
        self._wire.plain_bytes += ring_bytes(buffer.nbytes, ranks)
        self._wire.wire_bytes += ring_bytes(small.nbytes, ranks)

        def widen(_: object) -> Tensor:
            return buffer.copy_(small)

        return chain(dist.all_reduce(small, group=self._group, async_op=True), widen)


class Int8Hook:
    """Averages gradients as int8, by an all-to-all and an all-gather, each with error feedback.

    Int8 cannot be summed on the way, so each rank gets everyone's int8 of its own part, averages it in fp32, and sends
    the average as int8 again: a quarter of the bytes of an all-reduce in fp32, on any number of ranks. What rounding
    loses on a rank, before the sum or after it, that rank adds to its next gradient (1-bit Adam, Tang et al. 2021).
    Backward waits for it.
    """

    def __init__(self, group: dist.ProcessGroup, wire: WireCounter, memory: GradientMemory) -> None:
        self._group, self._wire, self._memory = group, wire, memory

    def __call__(self, bucket: GradBucket) -> GradFuture:
        buffer, gradients = bucket.buffer(), bucket.gradients()
        owed = self._memory.like("int8.owed", bucket.parameters(), gradients)
        torch._foreach_add_(gradients, owed)
        mean, error = average_int8(buffer, self._group, self._wire)
        copy_parts(owed, gradients, error)
        buffer.copy_(mean)
        return finished(buffer)


def average_int8(flat: Tensor, group: dist.ProcessGroup, wire: WireCounter) -> tuple[Tensor, Tensor]:
    """Average (n,) over the ranks, sent as int8; returns the mean, fp32, and what rounding lost of this rank's.

    Both are (n,), and the mean is the same on all ranks.
    """
    ranks, rank = group.size(), group.rank()
    parts = pad_to_parts(flat, ranks)  # (ranks, part)
    sent = exchange_int8(parts, group, wire)
    own = sent.received.sum(0).div_(ranks)
    packed, own_error = quantise(own)
    everyone = torch.empty((ranks, packed.numel()), dtype=torch.uint8, device=flat.device)
    all_gather_flat(everyone, packed, group, async_op=False)
    wire.wire_bytes += (ranks - 1) * packed.nbytes
    wire.plain_bytes += ring_bytes(flat.nbytes, ranks)
    # The rounding of the average is owed once, not once a rank: its owner adds it to its own gradient in full.
    sent.error[rank].add_(own_error, alpha=ranks)
    return dequantise(everyone, own.numel()).reshape(-1)[: flat.numel()], sent.error.reshape(-1)[: flat.numel()]


class _Sent:
    """The result of an exchange: everyone's values for this rank's part, and the error of what this rank sent."""

    def __init__(self, received: Tensor, error: Tensor) -> None:
        self.received, self.error = received, error


def exchange_int8(parts: Tensor, group: dist.ProcessGroup, wire: WireCounter) -> _Sent:
    """Send part i of (ranks, part) to rank i as int8; both results are (ranks, part) and of the type of ``parts``."""
    packed, error = quantise(parts)
    received = torch.empty_like(packed)
    dist.all_to_all_single(received, packed, group=group)
    ranks = parts.shape[0]
    wire.wire_bytes += packed.nbytes * (ranks - 1) // ranks
    return _Sent(dequantise(received, parts.shape[1]).to(parts.dtype), error)


def quantise(values: Tensor) -> tuple[Tensor, Tensor]:
    """Round (..., n) to int8 with one scale a block; returns the bytes (..., n + 4 x blocks) and what rounding lost.

    A block with a value that is not finite gets a scale that is not finite, so that overflow stays visible.
    """
    size = values.shape[-1]
    blocks = -(-size // INT8_BLOCK)
    wide = values.float()
    padded = torch.nn.functional.pad(wide, (0, blocks * INT8_BLOCK - size))
    cut = padded.reshape(*padded.shape[:-1], blocks, INT8_BLOCK)
    scales = cut.abs().amax(-1, keepdim=True) / 127
    divisors = torch.where(scales > 0, scales, torch.ones_like(scales))
    rounded = (cut / divisors).nan_to_num_(0.0, 0.0, 0.0).round_().clamp_(-127, 127)
    back = (rounded * scales).flatten(-2)[..., :size]
    error = (wide - back).nan_to_num_(0.0, 0.0, 0.0).to(values.dtype)
    integers = rounded.flatten(-2)[..., :size].to(torch.int8).contiguous()
    return torch.cat([integers.view(torch.uint8), scales.squeeze(-1).contiguous().view(torch.uint8)], -1), error


def dequantise(packed: Tensor, size: int) -> Tensor:
    """Undo ``quantise``: (..., bytes) to fp32 (..., size)."""
    blocks = -(-size // INT8_BLOCK)
    integers = packed[..., :size].contiguous().view(torch.int8).float()
    scales = packed[..., size:].clone(memory_format=torch.contiguous_format).view(torch.float32)  # aligned anew
    padded = torch.nn.functional.pad(integers, (0, blocks * INT8_BLOCK - size))
    cut = padded.reshape(*padded.shape[:-1], blocks, INT8_BLOCK) * scales.unsqueeze(-1)
    return cut.flatten(-2)[..., :size]


def pad_to_parts(flat: Tensor, ranks: int) -> Tensor:
    """Cut (n,) into (ranks, part), the last filled with zeros."""
    part = -(-flat.numel() // ranks)
    return torch.nn.functional.pad(flat, (0, part * ranks - flat.numel())).view(ranks, part)


def copy_parts(targets: Sequence[Tensor], like: Sequence[Tensor], flat: Tensor) -> None:
    """Copy a bucket's flat tensor to one tensor for each gradient of the bucket, which lie in it one after another."""
    offset = 0
    for target, gradient in zip(targets, like, strict=True):
        target.copy_(flat[offset : offset + gradient.numel()].view_as(gradient))
        offset += gradient.numel()


def chain(work: dist.Work, finish: Callable[[object], Tensor]) -> GradFuture:
    """Return the future of what ``finish`` returns once the collective is done."""
    return cast(GradFuture, work.get_future().then(finish))


def finished(result: Tensor) -> GradFuture:
    """Return a future that is done already."""
    future: GradFuture = torch.futures.Future()
    future.set_result(result)
    return future
