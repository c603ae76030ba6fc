"""Batches of shared memory on their way to a device that copies late: none is filled again before its copy is done."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from late_device import LateDevice, feeder

from penstock.loader.counters import Counters
from penstock.loader.errors import LoaderClosedError
from penstock.loader.pipeline.beside.frames import Frame, read_frame
from penstock.loader.pipeline.beside.pinning import PinnedSlots
from penstock.loader.pipeline.beside.remote import RemotePipeline
from penstock.loader.pipeline.beside.requests import Known, Request
from penstock.loader.pipeline.beside.slots import FilledSlot, Slots
from penstock.loader.pipeline.delivery_queue import Delivery
from penstock.loader.pipeline.tuning import PipelineOptions

ROWS = 20_000
REQUEST = Request(
    fingerprint="f", order={}, epoch=0, position=0, rank=0, world_size=1, global_batch_size=1, weights=None, work="w"
)
KNOWN = Known(bad=(), bad_chunks=(), channel=None)


class MadeLocks:
    def __init__(self, *, succeeds: bool) -> None:
        self.locked: set[int] = set()
        self.succeeds = succeeds

    def lock(self, address: int, nbytes: int) -> bool:
        if self.succeeds:
            self.locked.add(address)
        return self.succeeds

    def unlock(self, address: int) -> None:
        self.locked.remove(address)


class MadeProcess:
    """Fills slots as the loader's process does: as soon as they are free, ahead of the loop."""

    pid = 1
    is_stopped = False

    def __init__(self, pinned: PinnedSlots) -> None:
        self._pinned = pinned
        self._slots = Slots(0, pinned.prepare)
        self._filled: dict[int, FilledSlot] = {}
        self._free: deque[int] = deque()
        self._ready: deque[tuple[int, int, int]] = deque()
        self._made = 0
        self._fill()

    def start(self) -> None:
        pass

    def begin(self, *_: Any) -> int:
        return 1

    def end(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def write_waits(self, *_: Any) -> None:
        pass

    def is_pinned(self, address: int, nbytes: int) -> bool:
        return self._pinned.are_pinned(address, nbytes)

    @property
    def has_message(self) -> bool:
        self._fill()
        return bool(self._ready)

    def _fill(self) -> None:
        self._free.extend(slot.number for slot in self._slots.settle())
        for slot in self._slots.add():
            slot.is_sent = True
            self._filled[slot.number] = FilledSlot(slot.number, os.dup(slot.descriptor))
            self._free.append(slot.number)
        while self._free:
            slot = self._filled[self._free.popleft()]
            batch = {"x": torch.full((ROWS,), self._made), "n": self._made}
            item = Delivery(0, self._made, self._made + 1, np.array([self._made]), 8 * ROWS, None)
            frame = Frame(item, batch)
            frame.write(slot.fit(frame.nbytes))
            self._made += 1
            self._ready.append((slot.number, slot.nbytes, frame.nbytes))

    def receive(self, check: Callable[[], None]) -> tuple[Any, Any]:
        check()
        self._fill()
        number, nbytes, used = self._ready.popleft()
        memory, is_lent = self._slots.take(number, nbytes, used)
        if not is_lent:
            self._free.append(number)
        return read_frame(memory)

    def close(self) -> None:
        self._slots.close()
        for slot in self._filled.values():
            slot.close()


def make(*, locks: MadeLocks | None, on_device: bool) -> tuple[RemotePipeline, MadeProcess, LateDevice | None]:
    options = PipelineOptions(
        fetch_threads=1,
        most_fetch_threads=1,
        decode_threads=1,
        read_ahead_bytes=1,
        memory_limit_bytes=1,
        chunk_budget_bytes=1,
        header_budget_bytes=1,
        batch_budget_bytes=1,
        span_bytes=1,
    )
    process = MadeProcess(PinnedSlots(locks))
    feeding, device = feeder() if on_device else (None, None)
    made: Any = process
    pipeline = RemotePipeline(made, REQUEST, KNOWN, options=options, counters=Counters(), feeder=feeding)
    pipeline.start()
    return pipeline, process, device


@pytest.mark.parametrize("succeeds", [True, False])
def test_batches_reach_a_late_device_whole_and_in_order(succeeds: bool) -> None:
    locks = MadeLocks(succeeds=succeeds)
    pipeline, process, device = make(locks=locks, on_device=True)
    kept = []
    for number in range(40):
        item = pipeline.get()
        assert (item.start, item.batch["n"]) == (number, number)
        kept.append(item.batch["x"])
    assert device is not None
    for event in device.events:
        event.run()
    assert all((tensor == number).all() for number, tensor in enumerate(kept))
    assert bool(device.allocated) is not succeeds  # from where they are, without another copy
    pipeline.close()
    process.close()


def test_what_was_locked_is_unlocked_once_nothing_needs_it() -> None:
    locks = MadeLocks(succeeds=True)
    pipeline, process, _ = make(locks=locks, on_device=False)
    batch = pipeline.get().batch
    assert locks.locked
    pipeline.close()
    process.close()
    assert len(locks.locked) == 1
    del batch
    assert not locks.locked


def test_an_error_from_outside_comes_before_the_batches_that_wait() -> None:
    pipeline, process, _ = make(locks=None, on_device=True)
    pipeline.get()
    pipeline.interrupt(ArithmeticError("of another rank"))
    with pytest.raises(ArithmeticError, match="of another rank"):
        pipeline.get()
    pipeline.interrupt(None)
    assert pipeline.get().start == 1
    pipeline.close()
    with pytest.raises(LoaderClosedError):
        pipeline.get()
    process.close()
