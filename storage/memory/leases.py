"""Leases of memory that is reclaimed when nothing refers to it any more: of chunks, of batches and of views.

All values on lent memory refer to one object, the memory's *exporter*: slices and arrays of numpy, torch or Arrow keep
it alive. When it is deallocated the memory is free, so never while any of them lives, whoever holds it. It is a plain
numpy array on purpose. Python's garbage collector does not track those, so a weak reference to one dies only with its
last reference; that to a tracked object dies before the finalizers of its cycle, which may yet revive it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

Memory = TypeVar("Memory")


class _Lease(weakref.ref[Any], Generic[Memory]):
    """Weak reference to an exporter, with the memory to reclaim when it dies."""

    __slots__ = ("memory",)
    memory: Memory


class MemoryLeases(Generic[Memory]):
    """Leases of memory: those still out, and those that ended and wait to be reclaimed. Any thread may call any method.

    An exporter may die at any allocation of any thread. No Python function is called then: an interrupt raised inside
    a callback would be lost.
    """

    def __init__(self) -> None:
        self._lent: dict[int, _Lease[Memory]] = {}  # by their own ids
        self._ended: deque[_Lease[Memory]] = deque()

    def lend(self, memory: Memory, exporter: Any) -> weakref.ref[Any]:
        """Lend ``memory``, or a stand-in for it, until ``exporter``, a numpy array, is deallocated.

        Returns a weak reference to the exporter.
        """
        lease: _Lease[Memory] = _Lease(exporter, self._ended.append)
        lease.memory = memory
        self._lent[id(lease)] = lease
        return lease

    def reclaim(self) -> Iterator[Memory]:
        """Reclaim the memory of leases that ended since the last call. An interrupt between two may lose one."""
        with suppress(IndexError):
            while True:
                lease = self._ended.popleft()
                self._lent.pop(id(lease), None)
                yield lease.memory

    def outstanding(self) -> Iterator[Memory]:
        """Memory that is still referred to."""
        return (lease.memory for lease in self._lent.copy().values())

    def forget(self) -> None:
        """Reclaim nothing that is lent now: each memory is freed with the last reference to it."""
        self._lent.clear()  # a weak reference that is gone calls nothing back
