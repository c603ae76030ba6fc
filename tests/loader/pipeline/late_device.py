"""A device made up of copies that are late, and a ring that feeds it."""

from __future__ import annotations

import threading
from collections.abc import Sequence

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


class LateEvent:
    """Passes when someone waits for it, or when ``let_pass`` is set: only then are the copies before it done."""

    def __init__(self, copies: list[tuple[torch.Tensor, torch.Tensor]], gate: threading.Event | None = None) -> None:
        self._copies = copies
        self._gate = gate
        self._running = threading.Lock()  # of two that wait, one copies; the other may overwrite the sources after it
        self.waits = 0

    def run(self) -> None:
        with self._running:
            for target, source in self._copies:
                target.copy_(source)
            self._copies = []

    def synchronize(self) -> None:
        self.waits += 1
        if self._gate is not None:
            self._gate.wait(60)
        self.run()


class LateDevice:
    """Reads the pinned memory as late as a device may: when the copy's event is waited for, and no sooner."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.allocated: list[int] = []
        self.sources: list[Sequence[torch.Tensor]] = []
        self.events: list[LateEvent] = []
        self.handed: list[int] = []
        self._gate = gate

    def allocate_pinned(self, nbytes: int) -> torch.Tensor:
        self.allocated.append(nbytes)
        return torch.full((nbytes,), 255, dtype=torch.uint8)

    def start_copies(self, sources: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], LateEvent]:
        self.sources.append(sources)
        targets = [
            torch.empty_strided(source.size(), source.stride(), dtype=source.dtype).fill_(99) for source in sources
        ]
        event = LateEvent(list(zip(targets, sources, strict=True)), self._gate)
        self.events.append(event)
        return targets, event

    def hand_over(self, tensors: Sequence[torch.Tensor], event: LateEvent) -> None:
        event.run()
        self.handed.append(len(tensors))


def feeder(slots: int = 3, gate: threading.Event | None = None) -> tuple[DeviceFeeder, LateDevice]:
    device = LateDevice(gate)
    return DeviceFeeder("cuda", slots=slots, backend=device), device
