"""State that training changes and no checkpoint holds: buffers with ``persistent=False``, an optimizer's attributes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ...storage.suggestions import list_some
from ..parallel.ema import bare_name

_NAMED = 5
_Mark = tuple[torch.Size, torch.dtype, int]
_Number = tuple[type, float]


class Unsaved:
    """Finds, at a save, buffers and numbers of an optimizer that a resumed run would begin anew; tells of them once.

    Caches are no state: those that the first step makes are known before the comparison, those that grow with longer
    batches have another shape then. Mutable state: what there was after the first step, and whether that was compared.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._first: tuple[int, dict[str, _Mark], dict[str, _Number | _Mark]] | None = None
        self._is_done = False

    def end_step(self, step: int) -> None:
        """Keep what there is after the first step of this process."""
        if self._first is None:
            self._first = (step, dict(self._marks()), self._attributes())
            self._is_done = not any(self._first[1:])

    def describe_changed(self, step: int) -> list[str]:
        """A sentence on each kind that changed from the first step to this one, at the first call that can tell."""
        if self._is_done or self._first is None or step <= self._first[0]:
            return []
        _, buffers, attributes = self._first
        self._is_done, sentences = True, []
        if changed := _changed(buffers, dict(self._marks())):
            sentences.append(
                "training changes buffers that no checkpoint has, because they are registered with persistent=False: "
                f"{changed}. A resumed run starts with fresh ones and may differ from an "
                "unbroken run. Leave persistent=False out, unless forward computes them from each batch alone"
            )
        if changed := _changed(attributes, self._attributes()):
            sentences.append(
                f"training changes attributes of optimizer={type(self._optimizer).__name__} that no checkpoint has: "
                f"{changed}. A resumed run starts with fresh ones and may differ from an unbroken run. Keep what "
                "decides updates in state[parameter] or in a parameter group"
            )
        return sentences

    def _attributes(self) -> dict[str, _Number | _Mark]:
        found: dict[str, _Number | _Mark] = {}
        for name, value in vars(self._optimizer).items():
            if type(value) in (int, float):
                found[name] = (type(value), value)
            elif type(value) is Tensor and value.layout is torch.strided:
                found[name] = (value.shape, value.dtype, _checksum(value))
        return found

    def _marks(self) -> Iterator[tuple[str, _Mark]]:
        for prefix, module in self._model.named_modules():
            for name in sorted(module._non_persistent_buffers_set):
                buffer = module._buffers.get(name)
                if type(buffer) is Tensor and buffer.layout is torch.strided and not buffer.is_meta:
                    yield bare_name(f"{prefix}.{name}".lstrip(".")), (buffer.shape, buffer.dtype, _checksum(buffer))


def _changed(before: Mapping[str, tuple[Any, ...]], now: Mapping[str, tuple[Any, ...]]) -> str:
    """The names of what has the same form and another value now; empty where there is none."""
    changed = [
        name for name, mark in now.items() if name in before and mark[:-1] == before[name][:-1] and mark != before[name]
    ]
    return list_some(changed, _NAMED)


def _checksum(tensor: Tensor) -> int:
    """Of the values, wherever they lie; it costs one copy to the CPU, twice in a run."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
