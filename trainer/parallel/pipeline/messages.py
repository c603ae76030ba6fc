"""Tensors on their way between stages: activations forward, gradients back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .staged import Layout

Key = tuple[str, int, int]
"""What is sent (F: activations, B: gradients), the stage that gets it, and the part of the batch."""


class Messages:
    """Sends and receives without waiting until what is received is used. Mutable state: what is under way.

    Receivers know layouts beforehand, so that messages are bytes and nothing else.
    """

    def __init__(self, group: dist.ProcessGroup | None, device: torch.device, stages: int) -> None:
        self._group = group
        self._device = device
        self._stages = stages
        self._coming: dict[Key, tuple[list[Tensor], list[dist.Work | None]]] = {}
        self._going: list[tuple[Tensor, dist.Work | None]] = []

    def send(self, key: Key, tensors: list[Tensor], layouts: list[Layout], rank: int) -> None:
        """Send to ``rank`` of the group; each tensor is laid out as the receiver expects it."""
        for at, (tensor, layout) in enumerate(zip(tensors, layouts, strict=True)):
            line = _as_bytes(_laid_out(tensor.detach(), layout))
            work = dist.isend(line, group=self._group, group_dst=rank, tag=self._tag(key, at))
            self._going.append((line, work))

    def expect(self, key: Key, layouts: list[Layout], rank: int) -> None:
        """Begin to receive from ``rank`` of the group."""
        tensors, works = [], []
        for at, layout in enumerate(layouts):
            tensor = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=self._device)
            tensors.append(tensor)
            works.append(dist.irecv(_as_bytes(tensor), group=self._group, group_src=rank, tag=self._tag(key, at)))
        self._coming[key] = (tensors, works)

    def put(self, key: Key, tensors: list[Tensor]) -> None:
        """Hand tensors over to another stage of this rank."""
        self._coming[key] = ([one.detach() for one in tensors], [])

    def take(self, key: Key) -> list[Tensor]:
        """Wait for what was expected, and return it."""
        tensors, works = self._coming.pop(key)
        for work in works:
            if work is not None:
                work.wait()
        return tensors

    def settle(self) -> None:
        """Wait until all that was sent has gone."""
        for _, work in self._going:
            if work is not None:
                work.wait()
        self._going = []

    def _tag(self, key: Key, at: int) -> int:
        kind, stage, part = key
        return ((part * self._stages + stage) * 2 + (kind == "B")) * 16 + at


def expected_layout(layout: Layout) -> Layout:
    """A dense layout for a tensor that may be a view: its own where that is dense, else contiguous."""
    probe = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device="meta")
    if torch.ops.aten.is_non_overlapping_and_dense(probe):
        return layout
    return Layout.of(torch.empty(layout.shape, dtype=layout.dtype, device="meta"))


def _laid_out(tensor: Tensor, layout: Layout) -> Tensor:
    if tuple(tensor.stride()) == layout.stride:
        return tensor
    made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=tensor.device)
    return made.copy_(tensor)


def _as_bytes(tensor: Tensor) -> Tensor:
    """The memory of a dense tensor as a vector of bytes, which all backends send, whatever its format."""
    line: Any = tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())
    return torch.view_as_real(line).view(torch.uint8).flatten() if line.is_complex() else line.view(torch.uint8)
