"""Compression for ``fully_shard``: reduce-scatters that send fewer bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ..errors import CompressionError
from .dense import CAST_TYPES, exchange_int8
from .memory import GradientMemory
from .wire import WireCounter, reduce_scatter_bytes, reduce_scatter_flat


class _InOrdinaryMemory(ReduceScatter):
    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CastReduceScatter(_InOrdinaryMemory):
    """Reduces in bf16 or fp16, or in the given format ("none"), and counts the bytes."""

    def __init__(self, scheme: Literal["none", "bf16", "fp16"], wire: WireCounter) -> None:
        self._dtype, self._wire = CAST_TYPES.get(scheme), wire

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        _refuse_async(async_op)
        small = input_tensor if self._dtype is None else input_tensor.to(self._dtype)
        self._wire.plain_bytes += reduce_scatter_bytes(input_tensor.nbytes, group, input_tensor.device)
        self._wire.wire_bytes += reduce_scatter_bytes(small.nbytes, group, input_tensor.device)
        if small.dtype == output_tensor.dtype:
            reduce_scatter_flat(output_tensor, small, op, group)
            return
        part = torch.empty_like(output_tensor, dtype=small.dtype)
        reduce_scatter_flat(part, small, op, group)
        output_tensor.copy_(part)


class Int8ReduceScatter(_InOrdinaryMemory):
    """Sends each rank its part as int8 with error feedback, and sums in full precision.

    The rounding error is kept for the whole module, in the type in which gradients are reduced: one more copy of the
    model on each rank, against what zero=2 and 3 save.
    """

    def __init__(self, name: str, wire: WireCounter, memory: GradientMemory) -> None:
        self._key, self._wire, self._memory = f"int8.owed.{name or 'root'}", wire, memory

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        _refuse_async(async_op)
        ranks = group.size()
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
            raise CompressionError(f"int8 cannot reduce gradients with {op}; leave the divide factor as it is")
        correction = self._memory.correction
        if correction is None:
            output_tensor.zero_()
            return
        if correction != 1.0:
            input_tensor *= correction
        owed = self._memory.named(self._key, input_tensor)
        parts = (input_tensor + owed).view(ranks, -1)
        sent = exchange_int8(parts, group, self._wire)
        owed.copy_(sent.error.view_as(owed))
        self._wire.plain_bytes += reduce_scatter_bytes(input_tensor.nbytes, group, input_tensor.device)
        torch.sum(sent.received, 0, out=output_tensor)
        if op == dist.ReduceOp.AVG:
            output_tensor /= ranks


def _refuse_async(async_op: bool) -> None:
    if async_op:
        raise CompressionError("this reduce-scatter works in the caller's stream and cannot be asked for async_op")
