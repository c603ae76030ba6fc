"""Reused memory for batches: fresh memory costs a page fault for each 4 KiB, more than filling it does.

A block is lent as an array, until nothing refers to any view of it, or tensor on it (`penstock.storage.memory.leases`).
A kept batch keeps its block, and a new one is made instead. Where batches go to a device, blocks are pinned, so
that the copies start from them.

Mutable state: the free blocks and where pinned ones lie, under a lock, and the leases.
"""

from __future__ import annotations

import math
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage.memory.leases import MemoryLeases

if TYPE_CHECKING:
    from ..columns import AnyArray

_LEAST_BYTES = 64 << 10  # smaller arrays come from malloc, which keeps their memory
_ALIGN_BYTES = 64  # a cache line: stores of the widest registers then touch one line each


class BatchMemory:
    """Lends arrays, and keeps ``most_bytes`` of free blocks at most. Any thread may call any method.

    ``allocate_pinned`` makes (nbytes,) uint8 of page-locked memory, and raises RuntimeError where there is none; then
    blocks are those of numpy.
    """

    def __init__(self, most_bytes: int, allocate_pinned: Callable[[int], AnyArray] | None = None) -> None:
        self._most_bytes = most_bytes
        self._allocate_pinned = allocate_pinned
        self._pinned: list[tuple[int, int]] = []  # where pinned blocks begin and end, in order
        self._free: dict[int, list[AnyArray]] = {}  # by size; the last one was used last
        self._free_bytes = 0
        self._leases: MemoryLeases[AnyArray] = MemoryLeases()
        self._lock = threading.RLock()  # a collection of garbage may come back here at any allocation

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
        """Like ``np.empty``: a writable, contiguous array of arbitrary values."""
        nbytes = math.prod(shape) * dtype.itemsize
        if nbytes < _LEAST_BYTES:
            return np.empty(shape, dtype)
        with self._lock:
            self._settle()
            free = self._free.get(nbytes)
            block = free.pop() if free else None
            if block is not None:
                self._free_bytes -= nbytes
        if block is None:
            block = self._new_block(nbytes)
        # Numpy lets views refer to the array that owns their memory, past those between, but not past a memoryview.
        exporter: AnyArray = np.frombuffer(block.data, np.uint8)
        self._leases.lend(block, exporter)
        return exporter.view(dtype).reshape(shape)

    def _new_block(self, nbytes: int) -> AnyArray:
        allocate = self._allocate_pinned
        if allocate is None:
            return _aligned(nbytes)
        try:
            block = allocate(nbytes)
        except RuntimeError:  # no more can be locked; what feeds the device copies these
            self._allocate_pinned = None
            return _aligned(nbytes)
        with self._lock:
            self._pinned = sorted([*self._pinned, _place_of(block)])
        return block

    def is_pinned(self, address: int, nbytes: int) -> bool:
        """Return whether these bytes, of an array that is lent, are page-locked."""
        with self._lock:
            number = bisect_right(self._pinned, (address, math.inf)) - 1
            return number >= 0 and address + nbytes <= self._pinned[number][1]

    @property
    def free_bytes(self) -> int:
        """Bytes of blocks that are kept and unused."""
        with self._lock:
            self._settle()
            return self._free_bytes

    def close(self) -> None:
        """Keep nothing from now on. Arrays that are lent stay as they are."""
        with self._lock:
            self._most_bytes = 0
            self._settle()
            self._leases.forget()
            self._free.clear()
            self._pinned.clear()
            self._free_bytes = 0

    def _settle(self) -> None:
        """Take back the blocks that nothing refers to any more. Holds the lock."""
        for block in self._leases.reclaim():
            if self._free_bytes + block.nbytes > self._most_bytes:
                self._forget_others(block.nbytes)
            if self._free_bytes + block.nbytes <= self._most_bytes:
                self._free.setdefault(block.nbytes, []).append(block)
                self._free_bytes += block.nbytes
            else:
                self._drop([block])

    def _forget_others(self, nbytes: int) -> None:
        """Drop the blocks of all other sizes, as the size that is lent has changed. Holds the lock."""
        kept = self._free.pop(nbytes, [])
        self._drop([block for blocks in self._free.values() for block in blocks])
        self._free = {nbytes: kept} if kept else {}
        self._free_bytes = nbytes * len(kept)

    def _drop(self, blocks: Iterable[AnyArray]) -> None:
        """Forget where blocks lie that are given back to the system. Holds the lock."""
        if self._pinned and (gone := set(map(_place_of, blocks))):
            self._pinned = [place for place in self._pinned if place not in gone]


def new_array(memory: BatchMemory | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
    """Make an array of ``memory``; without one, by numpy."""
    return np.empty(shape, dtype) if memory is None else memory.empty(shape, dtype)


def _place_of(block: AnyArray) -> tuple[int, int]:
    start = block.ctypes.data
    return start, start + block.nbytes


def _aligned(nbytes: int) -> AnyArray:
    block = np.empty(nbytes + _ALIGN_BYTES, np.uint8)
    skip = -block.ctypes.data % _ALIGN_BYTES
    return block[skip : skip + nbytes]
