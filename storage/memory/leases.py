"""Memory that is lent, and comes back when nothing refers to it any more: that of chunks, of batches and of views.

What is lent refers to one object, the memory's *exporter*. Whatever is made of it, slices, arrays of numpy, torch or
Arrow, keeps that alive, and when it is deallocated the memory is free: so never before the last of them is gone,
whoever holds it. The exporter is a plain numpy array on purpose. Python's garbage collector does not track those, so
its weak reference dies with its last reference alone; of a tracked object it dies before the finalizers of a cycle that
the object is part of, which may yet revive it.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, Generic, TypeVar

Memory = TypeVar("Memory")


class _Lease(weakref.ref[Any], Generic[Memory]):
    """Tells when an exporter is deallocated."""

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
        """Note that ``memory``, or what stands for it, is lent until ``exporter``, a numpy array, is deallocated.

        What is returned refers to the exporter as long as that lives.
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
        """Memory that somebody still refers to."""
        return (lease.memory for lease in self._lent.copy().values())

    def forget(self) -> None:
        """Nothing that is lent comes back: each memory goes with the last reference to it."""
        self._lent.clear()  # a weak reference that is gone tells nobody
