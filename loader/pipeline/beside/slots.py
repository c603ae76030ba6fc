"""The shared memory through which batches come: slots without names, lent to the loop until their tensors die.

The training process makes a slot, as an anonymous file in memory, and sends its descriptor to the loader's process,
which sizes it, fills it and names it in a message. The kernel frees it with the last of the two processes: nothing is
left behind, however they end, and the size of /dev/shm means nothing to it.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ....storage.memory.leases import MemoryLeases

if TYPE_CHECKING:
    from ...columns import AnyArray

_SPARE = 4  # slots that are not lent: one that waits, and some to fill meanwhile
_LEAST, _MOST = 8, 64  # whatever memory they take: the loop has one or two, and three may be on their way to a device
_LEAST_BYTES = 64 << 10
_SLACK = 8  # an eighth more than was asked for: the next batch may be a little larger


class Slot:
    """One slot in the training process. ``is_sent``: the loader's process has its descriptor.

    ``is_retired``: a forked child may see it, so that it is not used again.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.descriptor = os.memfd_create("penstock-batch")
        self.is_sent = False
        self.is_retired = False
        self._memory: AnyArray | None = None

    def view(self, nbytes: int, prepare: Callable[[AnyArray, mmap.mmap], None]) -> AnyArray:
        """View the slot, which has ``nbytes``; ``prepare`` gets memory that is newly mapped."""
        if self._memory is None or len(self._memory) != nbytes:
            pages = mmap.mmap(self.descriptor, nbytes)
            self._memory = np.frombuffer(pages, np.uint8)
            prepare(self._memory, pages)
        return self._memory

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def close(self) -> None:
        """Forget the memory, which is freed with its last view."""
        self._memory = None
        os.close(self.descriptor)


class Slots:
    """The slots of one loader in the training process, where the loop's thread alone uses them.

    ``most_bytes`` are those that the slots may have together; eight are made in any case.
    """

    def __init__(self, most_bytes: int, prepare: Callable[[AnyArray, mmap.mmap], None]) -> None:
        self._most_bytes = most_bytes
        self._prepare = prepare
        self._slots: dict[int, Slot] = {}
        self._made = 0
        self._leases: MemoryLeases[Slot] = MemoryLeases()
        self._lent: dict[int, Slot] = {}

    def limit(self, most_bytes: int) -> None:
        """Let the slots have so many bytes together from now on."""
        self._most_bytes = most_bytes

    def add(self) -> Iterator[Slot]:
        """Make the slots that are missing, and may be made; yield those that were not sent yet.

        Raises:
            OSError: there is no memory, or no descriptor, left for one.
        """
        while self._spare < _SPARE and self._may_grow:
            slot = Slot(self._made)
            self._made += 1
            self._slots[slot.number] = slot
        yield from [slot for slot in self._slots.values() if not slot.is_sent]

    @property
    def _spare(self) -> int:
        return len(self._slots) - len(self._lent)

    @property
    def _may_grow(self) -> bool:
        count = len(self._slots)
        return count < _LEAST or (count < _MOST and not self.is_full)

    @property
    def is_full(self) -> bool:
        """Return whether another slot of the usual size would exceed what the slots may have together."""
        count = len(self._slots)
        return sum(slot.nbytes for slot in self._slots.values()) * (count + 1) > self._most_bytes * count

    def find_free(self) -> list[int]:
        """Find the slots that are not lent, whatever an interrupt left undone before."""
        self._lent = {slot.number: slot for slot in self._leases.outstanding()}
        return [number for number, slot in self._slots.items() if number not in self._lent and slot.is_sent]

    def take(self, number: int, nbytes: int, used: int) -> tuple[AnyArray, bool]:
        """Take a filled slot of ``nbytes``, (used,) uint8 of it, and say whether it is lent until no view is left.

        Where few are left and no more may be made, this is a copy, and the slot is free again.
        """
        slot = self._slots[number]
        memory = slot.view(nbytes, self._prepare)
        if self._spare <= _SPARE // 2 and not self._may_grow:
            return memory[:used].copy(), False
        exporter: AnyArray = np.frombuffer(memory.data, np.uint8, used)
        self._leases.lend(slot, exporter)
        self._lent[number] = slot
        return exporter, True

    def settle(self) -> Iterator[Slot]:
        """Take back the slots that nothing refers to any more; those that a forked child may see are given up."""
        for slot in self._leases.reclaim():
            self._lent.pop(slot.number, None)
            if slot.is_retired:
                del self._slots[slot.number]
                slot.close()
            yield slot

    def retire(self) -> None:
        """Before a fork: use no slot again that is lent now, since a child may go on reading from it."""
        for slot in list(self._lent.values()):
            slot.is_retired = True

    def close(self) -> None:
        """Forget all slots; what is lent lives on until its views are gone."""
        self._leases.forget()
        for slot in self._slots.values():
            slot.close()
        self._slots.clear()
        self._lent.clear()


class FilledSlot:
    """One slot in the loader's process."""

    def __init__(self, number: int, descriptor: int) -> None:
        self.number = number
        self._descriptor = descriptor
        self._pages: mmap.mmap | None = None
        self._memory: Any = None

    def fit(self, nbytes: int) -> AnyArray:
        """Make the slot as large as is needed, or smaller if it is far too large."""
        size = 0 if self._memory is None else len(self._memory)
        if not nbytes <= size <= max(_LEAST_BYTES, 4 * nbytes):
            wanted = max(_LEAST_BYTES, nbytes + nbytes // _SLACK)
            wanted += -wanted % mmap.PAGESIZE
            self._forget()
            os.ftruncate(self._descriptor, wanted)
            self._pages = mmap.mmap(self._descriptor, wanted)
            self._memory = np.frombuffer(self._pages, np.uint8)
        memory: AnyArray = self._memory
        return memory

    @property
    def nbytes(self) -> int:
        return 0 if self._memory is None else len(self._memory)

    def _forget(self) -> None:
        self._memory = None
        if self._pages is not None:
            self._pages.close()
            self._pages = None

    def close(self) -> None:
        self._forget()
        os.close(self._descriptor)
