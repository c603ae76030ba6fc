"""Slots of shared memory: none is filled again while anything refers to it, and none is lost."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.loader.pipeline.beside.slots import FilledSlot, Slots

NBYTES = 100_000


def open_descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class BothEnds:
    """The training process's slots, and the loader's process's: the same memory, mapped twice."""

    def __init__(self, most_bytes: int = 1 << 30) -> None:
        self.slots = Slots(most_bytes, lambda memory, pages: None)
        self.filled: dict[int, FilledSlot] = {}
        self.free: list[int] = []
        self.grow()

    def grow(self) -> None:
        for slot in self.slots.add():
            slot.is_sent = True
            self.filled[slot.number] = FilledSlot(slot.number, os.dup(slot.descriptor))
            self.free.append(slot.number)

    def deliver(self, value: int, nbytes: int = NBYTES) -> np.ndarray[Any, Any]:
        for slot in self.slots.settle():
            if slot.is_retired:
                self.filled.pop(slot.number).close()
            else:
                self.free.append(slot.number)
        self.grow()
        slot = self.filled[self.free.pop(0)]
        slot.fit(nbytes)[:nbytes] = value
        memory, is_lent = self.slots.take(slot.number, slot.nbytes, nbytes)
        if not is_lent:
            self.free.append(slot.number)
        return memory

    def close(self) -> None:
        self.slots.close()
        for slot in self.filled.values():
            slot.close()


@pytest.mark.parametrize("most_bytes", [0, 10 * NBYTES, 1 << 30])
def test_nothing_that_is_kept_is_overwritten(most_bytes: int) -> None:
    ends = BothEnds(most_bytes)
    kept = []
    for value in range(200):
        memory = ends.deliver(value)
        if value % 2 or value > 50:
            kept.append((value, memory[10:-10].view()))
        del memory
    assert all((view == value).all() for value, view in kept)
    lent = len(ends.filled) - len(ends.free)
    assert lent <= 64
    ends.close()
    assert all((view == value).all() for value, view in kept)


def test_a_loop_that_keeps_nothing_uses_the_same_few_slots() -> None:
    ends = BothEnds()
    for value in range(100):
        batch = ends.deliver(value)
    assert len(ends.filled) <= 5
    assert (batch == 99).all()
    ends.close()


def test_a_slot_grows_and_shrinks_with_its_batches() -> None:
    ends = BothEnds()
    for nbytes in (10, 5_000_000, 5_100_000, 10, 300_000):
        for value in range(8):
            assert (ends.deliver(value, nbytes) == value).all()
        assert max(slot.nbytes for slot in ends.filled.values()) < max(100_000, 5 * nbytes)
    ends.close()


def test_slots_that_a_fork_may_see_are_not_filled_again() -> None:
    ends = BothEnds()
    first = ends.deliver(1)
    there = mmap.mmap(ends.slots._slots[0].descriptor, NBYTES)
    ends.slots.retire()
    del first
    for value in range(2, 50):
        ends.deliver(value)
    assert there[:] == b"\1" * NBYTES
    assert 0 not in ends.filled
    there.close()
    ends.close()


def test_no_descriptor_is_left() -> None:
    gc.collect()
    before = open_descriptors()
    ends = BothEnds(0)
    kept = [ends.deliver(value) for value in range(20)]
    ends.close()
    del kept
    gc.collect()
    assert open_descriptors() == before
