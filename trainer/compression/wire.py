"""Collectives of bytes, counted as they go."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import torch.distributed as dist
from torch import Tensor

# Torch 2.13 renamed these and deprecated the old names; 2.11 has the old names only.
_ALL_GATHER = cast("Callable[..., dist.Work]", getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)
_REDUCE_SCATTER = cast(
    "Callable[..., dist.Work]", getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@dataclass
class WireCounter:
    """Bytes that this rank sent, and would have sent uncompressed."""

    wire_bytes: int = 0
    plain_bytes: int = 0


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of ``nbytes`` (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) * nbytes // ranks


def all_gather_flat(output: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work:
    """Gather every rank's ``part`` into ``output``, in rank order."""
    return _ALL_GATHER(output.view(-1), part, group=group, async_op=async_op)


def reduce_scatter_flat(output: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Sum ``whole`` over the ranks and keep this rank's part in ``output``."""
    _REDUCE_SCATTER(output, whole, op=op, group=group)
