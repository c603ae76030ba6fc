"""Memory of batches that is used again: new memory costs a page fault for each 4 KiB, which is more than filling it.

A block is lent as an array, until nothing refers to any view of it, or tensor on it (`penstock.storage.memory.leases`).
Whoever keeps a batch keeps its block, and others are made instead.

Mutable state: the free blocks, under a lock, and the leases.
"""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np

from ...storage.memory.leases import MemoryLeases
from ..columns import AnyArray

_LEAST_BYTES = 64 << 10  # smaller arrays come from malloc, which keeps their memory
_ALIGN_BYTES = 64  # a cache line: stores of the widest registers then touch one line each


class BatchMemory:
    """Lends arrays, and keeps ``most_bytes`` of free blocks at most. Any thread may call any method."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._free: dict[int, list[AnyArray]] = {}  # by size; the last one was used last
        self._free_bytes = 0
        self._leases: MemoryLeases[AnyArray] = MemoryLeases()
        self._lock = threading.RLock()  # a collection of garbage may come back here at any allocation

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
        """As ``np.empty``: a writable, contiguous array with values that mean nothing."""
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
            block = _aligned(nbytes)
        # Numpy lets views refer to the array that owns their memory, past those between, but not past a memoryview.
        exporter: AnyArray = np.frombuffer(block.data, np.uint8)
        self._leases.lend(block, exporter)
        return exporter.view(dtype).reshape(shape)

    @property
    def free_bytes(self) -> int:
        """Bytes that are kept and that nobody uses."""
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
            self._free_bytes = 0

    def _settle(self) -> None:
        """Take back the blocks that nothing refers to any more. Holds the lock."""
        for block in self._leases.reclaim():
            if self._free_bytes + block.nbytes > self._most_bytes:
                self._forget_others(block.nbytes)
            if self._free_bytes + block.nbytes <= self._most_bytes:
                self._free.setdefault(block.nbytes, []).append(block)
                self._free_bytes += block.nbytes

    def _forget_others(self, nbytes: int) -> None:
        """Drop the blocks of all other sizes: what is lent now is of another size than it was. Holds the lock."""
        kept = self._free.pop(nbytes, [])
        self._free = {nbytes: kept} if kept else {}
        self._free_bytes = nbytes * len(kept)


def new_array(memory: BatchMemory | None, shape: tuple[int, ...], dtype: np.dtype[Any]) -> AnyArray:
    """An array of ``memory``, or where there is none of numpy's own."""
    return np.empty(shape, dtype) if memory is None else memory.empty(shape, dtype)


def _aligned(nbytes: int) -> AnyArray:
    block = np.empty(nbytes + _ALIGN_BYTES, np.uint8)
    skip = -block.ctypes.data % _ALIGN_BYTES
    return block[skip : skip + nbytes]
