"""A device made up of copies that are late, and a ring that feeds it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np
import torch

from penstock.loader.pipeline.device import DeviceFeeder

TENSORS = {
    "uint8": torch.arange(7, dtype=torch.uint8),
    "int64": torch.arange(12).reshape(3, 4),
    "float64": torch.randn(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64),
    "bfloat16": torch.arange(9).to(torch.bfloat16),
    "bool": torch.tensor([True, False, True]),
    "complex": torch.tensor([1 + 2j, 3 - 4j]),
    "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    "scalar": torch.tensor(3.5),
    "empty": torch.zeros(0, 3),
    "channels_last": torch.arange(2 * 3 * 4 * 5).reshape(2, 4, 5, 3).permute(0, 3, 1, 2),
    "one_image": torch.arange(3 * 4 * 5).reshape(1, 4, 5, 3).permute(0, 3, 1, 2),
    "transposed": torch.arange(6).reshape(2, 3).t(),
    "every_second": torch.arange(10)[::2],
    "expanded": torch.arange(3).expand(4, 3),
    "middle": torch.arange(100)[40:60],
    "with_grad": torch.ones(2, requires_grad=True),
}


class Place:
    """Where a tensor lies."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.address, self.nbytes = tensor.data_ptr(), tensor.nbytes
        self.offset = tensor.storage_offset() * tensor.element_size()
        self.storage = tensor.untyped_storage().data_ptr()


class LateEvent:
    """Passes when someone waits for it, or when ``let_pass`` is set: only then are the copies before it done."""

    def __init__(self, copies: list[tuple[torch.Tensor, int]], gate: threading.Event | None, converted: list) -> None:
        self._copies = copies
        self._converted = converted
        self._gate = gate
        self._running = threading.Lock()  # of two that wait, one copies; the other may overwrite the sources after it
        self.waits = 0

    def run(self) -> None:
        with self._running:
            for target, address in self._copies:
                _read(address, target)
            for wide, stored in self._converted:
                wide.copy_(stored)
            self._copies, self._converted = [], []

    def synchronize(self) -> None:
        self.waits += 1
        if self._gate is not None:
            self._gate.wait(60)
        self.run()


def _read(address: int, target: torch.Tensor) -> None:
    """Copy what is at an address, of a tensor that may be gone, into one of its size and strides."""
    source: np.ndarray = np.frombuffer((ctypes.c_uint8 * target.nbytes).from_address(address), np.uint8)
    flat = target.as_strided((target.numel(),), (1,)).view(torch.uint8)
    np.copyto(flat.numpy(), source)


class LateDevice:
    """Reads the pinned memory as late as a device may: when the copy's event is waited for, and no sooner.

    It keeps no tensor from which it copies, only all that it allocated, as torch does until the copies are done:
    whoever lends the memory to others before has their bytes copied.
    """

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.allocated: list[int] = []
        self._pinned: list[torch.Tensor] = []
        self.sources: list[list[Place]] = []
        self.events: list[LateEvent] = []
        self.handed: list[int] = []
        self._gate = gate

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        self._pinned.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        return self._pinned[-1]

    def start_copies(
        self, sources: Sequence[torch.Tensor], dtypes: Sequence[torch.dtype]
    ) -> tuple[list[torch.Tensor], LateEvent]:
        self.sources.append([Place(source) for source in sources])
        targets = [torch.empty_strided(one.size(), one.stride(), dtype=one.dtype).fill_(99) for one in sources]
        copies = [(target, one.data_ptr()) for target, one in zip(targets, sources, strict=True) if one.nbytes]
        wide = [one if one.dtype == dtype else one.to(dtype) for one, dtype in zip(targets, dtypes, strict=True)]
        event = LateEvent(copies, self._gate, [(a, b) for a, b in zip(wide, targets, strict=True) if a is not b])
        self.events.append(event)
        return wide, event

    def hand_over(self, tensors: Sequence[torch.Tensor], event: LateEvent) -> None:
        event.run()
        self.handed.append(len(tensors))


def feeder(slots: int = 3, gate: threading.Event | None = None) -> tuple[DeviceFeeder, LateDevice]:
    device = LateDevice(gate)
    return DeviceFeeder("cuda", slots=slots, backend=device), device
