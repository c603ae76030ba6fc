"""Memory for what is read: large buffers, used again once nothing refers to them.

Memory that is new to a process costs more than the copy into it: the kernel clears each page when it is first touched.
So a released buffer is kept for the next read, as far as owners of a budget allow (`Allowance`).

A buffer is lent as a memoryview, until nothing refers to any part of it (`penstock.storage.memory.leases`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections import deque
from contextlib import suppress
from typing import Any

from .leases import MemoryLeases
from .libc import populate_pages

# Smaller ones are taken from malloc, which reuses them well.
LEAST_BYTES = 1 << 20
_STEPS = 16  # sizes within a power of two; a buffer is at most a sixteenth larger than what is asked for
_FITS = 2  # sizes above the one that is asked for, which also serve it


class _Region:
    """Memory of one size: private, so that what a forked child sees of it is not written to by its parent.

    Not of huge pages: where memory is full of cached files, as on a machine that reads data, the kernel first moves
    these about to find room for each, which costs several times what is saved.
    """

    __slots__ = ("capacity", "memory")

    def __init__(self, capacity: int) -> None:
        self.memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.capacity = capacity

    def populate(self, nbytes: int) -> None:
        """Have the kernel make the first pages at once, which are about to be written to."""
        with suppress(OSError):  # they come when they are touched
            populate_pages(ctypes.addressof(ctypes.c_char.from_buffer(self.memory)), nbytes, write=True)


class Allowance:
    """Bytes of idle buffers that the owner reserves in its own budget; none once it is closed or dropped."""

    def __init__(self, buffers: Buffers) -> None:
        self._buffers = buffers
        buffers._allowed[id(self)] = 0

    def set(self, nbytes: int) -> None:
        """Change it. Idle buffers above a smaller one go with the next buffer that is taken."""
        allowed = self._buffers._allowed
        if id(self) in allowed:  # not closed
            allowed[id(self)] = max(0, nbytes)

    def close(self) -> None:
        """Give the memory back at once; closing twice is allowed."""
        if self._buffers._allowed.pop(id(self), None) is not None:
            self._buffers._settle()
            self._buffers._trim()

    __del__ = close


class Buffers:
    """Lends memory, and keeps what came back, at most as much as all allowances together. Any thread may call.

    Mutable state: the idle regions, the leases, and the allowances. There is no lock, which a thread could be
    interrupted in, and buffers come back at any allocation of any thread: each step is one operation of a deque or
    dict, and between two of them a region has at most one holder. An interrupt there loses a region. Dicts are
    copied, which allocates nothing in between, before anybody walks them.
    """

    def __init__(self) -> None:
        self._idle: dict[int, deque[_Region]] = {}  # by capacity; those that were used last are at the end
        self._leases: MemoryLeases[_Region] = MemoryLeases()
        self._allowed: dict[int, int] = {}

    def take(self, nbytes: int) -> memoryview:
        """Take a writable buffer of exactly ``nbytes`` bytes (format 'B'), uninitialised.

        Hand out ``.toreadonly()`` of it, or of a slice. Code that writes to its address outside of Python must hold a
        view until the last write is done, also of a read that was given up.

        Raises:
            MemoryError: the system has no more.
        """
        import numpy as np  # not at the start: the command line need not wait for it

        if nbytes < LEAST_BYTES:
            return memoryview(np.empty(nbytes, np.uint8))  # type: ignore[arg-type]
        capacity = round_up(nbytes)
        self._settle()
        region = self._find(capacity)
        self._trim()  # to what was allowed when the room for this buffer was counted
        if region is None:
            try:
                region = _Region(capacity)
            except OSError as exc:
                raise MemoryError(f"no memory for a buffer of {nbytes:,} bytes: {exc.strerror}") from exc
            region.populate(nbytes)
        exporter: Any = np.frombuffer(region.memory, np.uint8, nbytes)
        if self._allowed:
            self._leases.lend(region, exporter)
        return memoryview(exporter)

    def allow(self) -> Allowance:
        """Room for idle buffers, of 0 bytes to begin with."""
        return Allowance(self)

    @property
    def idle_bytes(self) -> int:
        """Bytes that are kept for later reads."""
        self._settle()
        return sum(capacity * len(regions) for capacity, regions in self._idle.copy().items())

    @property
    def lent_bytes(self) -> int:
        """Bytes of the buffers that are lent, and will be used again."""
        self._settle()
        return sum(region.capacity for region in self._leases.outstanding())

    def _settle(self) -> None:
        """Take back the regions of leases that ended. Without an allowance those still lent are unmapped at their end.

        What an exporter held was counted until it died, and its owner's budget learns later that it is not. So it is
        kept, which takes no more memory than before, until the next buffer is taken from that budget.
        """
        if not self._allowed:
            self._leases.forget()
        for region in self._leases.reclaim():
            self._idle.setdefault(region.capacity, deque()).append(region)

    def _find(self, capacity: int) -> _Region | None:
        for _ in range(1 + _FITS):
            with suppress(KeyError, IndexError):
                return self._idle[capacity].pop()  # most of it may still be in the cores' caches
            capacity = round_up(capacity + 1)
        return None

    def _trim(self) -> None:
        """Release idle memory above the allowances, the largest regions first."""
        excess = self.idle_bytes - sum(self._allowed.copy().values())
        for capacity in sorted(self._idle.copy(), reverse=True) if excess > 0 else ():
            with suppress(KeyError, IndexError):
                while excess > 0:
                    self._idle[capacity].popleft()
                    excess -= capacity

    def _forget_in_child(self) -> None:
        """A forked child keeps what it refers to, and no idle memory."""
        self._allowed.clear()
        self._settle()
        self._idle.clear()


def round_up(nbytes: int) -> int:
    """Round up to the capacity of a buffer: a whole number of pages, at most a sixteenth more for large ones."""
    step = max(mmap.PAGESIZE, (1 << (nbytes - 1).bit_length()) // 2 // _STEPS)
    return -(-nbytes // step) * step


BUFFERS = Buffers()  # of this process
os.register_at_fork(after_in_child=BUFFERS._forget_in_child)
