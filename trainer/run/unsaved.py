"""Buffers that training changes and no checkpoint holds, because they were registered with ``persistent=False``."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..parallel.ema import bare_name

_NAMED = 5
_Mark = tuple[torch.Size, torch.dtype, int]


class UnsavedBuffers:
    """Finds, at a save, the buffers that a resumed run would begin anew; tells of them once.

    Caches are no state: those that the first step makes are known before the comparison, those that grow with longer
    batches have another shape then. Mutable state: what the buffers were after the first step, and whether that was
    compared.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._first: tuple[int, dict[str, _Mark]] | None = None
        self._is_done = False

    def end_step(self, step: int) -> None:
        """Keep what the buffers are after the first step of this process."""
        if self._first is None:
            self._first = (step, dict(self._marks()))
            self._is_done = not self._first[1]

    def describe_changed(self, step: int) -> str | None:
        """One sentence on those that changed from the first step to this one, at the first call that can tell."""
        if self._is_done or self._first is None or step <= self._first[0]:
            return None
        self._is_done, before = True, self._first[1]
        changed = [
            name
            for name, mark in self._marks()
            if name in before and mark[:2] == before[name][:2] and mark[2] != before[name][2]
        ]
        if not changed:
            return None
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        return (
            "training changes buffers that no checkpoint has, because they are registered with persistent=False: "
            f"{', '.join(changed[:_NAMED])}{more}. A resumed run starts with fresh ones and may differ from an "
            "unbroken run. Leave persistent=False out, unless forward computes them from each batch alone"
        )

    def _marks(self) -> Iterator[tuple[str, _Mark]]:
        for prefix, module in self._model.named_modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta:
                    yield bare_name(f"{prefix}.{name}".lstrip(".")), (buffer.shape, buffer.dtype, _checksum(buffer))


def _checksum(tensor: Tensor) -> int:
    """Of the values, wherever they lie; it costs one copy to the CPU, twice in a run."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
