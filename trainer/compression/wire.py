"""Collectives of bytes, counted as they go."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import cast

import torch
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

    def add(self, nbytes: int) -> None:
        """Count bytes that are sent uncompressed."""
        self.wire_bytes += nbytes
        self.plain_bytes += nbytes

    def add_ring(self, nbytes: int, ranks: int) -> None:
        """Count an uncompressed ring all-reduce."""
        self.add(ring_bytes(nbytes, ranks))

    def state_dict(self) -> dict[str, int]:
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.wire_bytes, self.plain_bytes = state["wire_bytes"], state["plain_bytes"]


def ring_bytes(nbytes: int, ranks: int) -> int:
    """Bytes that one rank sends in a ring all-reduce of ``nbytes`` (Patarasuk and Yuan 2009)."""
    return 2 * (ranks - 1) * nbytes // ranks


def reduce_scatter_bytes(nbytes: int, group: dist.ProcessGroup, device: torch.device) -> int:
    """Bytes that one rank sends when it reduces and scatters ``nbytes``: gloo makes an all-reduce of it."""
    whole = ring_bytes(nbytes, group.size())
    return whole if group._get_backend(device).name() == "gloo" else whole // 2


def all_gather_flat(output: Tensor, part: Tensor, group: dist.ProcessGroup, *, async_op: bool) -> dist.Work:
    """Gather every rank's ``part`` into ``output``, in rank order."""
    return _ALL_GATHER(output.view(-1), part, group=group, async_op=async_op)


def reduce_scatter_flat(output: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> None:
    """Sum ``whole`` over the ranks and keep this rank's part in ``output``."""
    _REDUCE_SCATTER(output, whole, op=op, group=group)
