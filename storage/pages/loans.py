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


class _Loan(weakref.ref[Any], Generic[Memory]):
    """Tells when an exporter is deallocated."""

    __slots__ = ("memory",)
    memory: Memory


class Loans(Generic[Memory]):
    """What is lent, and what came back and is not taken yet. Any thread may call; each step is one of a dict or deque.

    When an exporter dies, at any allocation of any thread, no function of Python's is called: an interrupt would be
    raised in it, and be lost, as all that is raised there.
    """

    def __init__(self) -> None:
        self._lent: dict[int, _Loan[Memory]] = {}  # by their own ids
        self._ended: deque[_Loan[Memory]] = deque()

    def lend(self, memory: Memory, exporter: Any) -> weakref.ref[Any]:
        """Note that ``memory``, or what stands for it, is lent until ``exporter``, a numpy array, is deallocated.

        What is returned refers to the exporter as long as that lives.
        """
        loan: _Loan[Memory] = _Loan(exporter, self._ended.append)
        loan.memory = memory
        self._lent[id(loan)] = loan
        return loan

    def take_back(self) -> Iterator[Memory]:
        """What came back since it was last asked for. Who is interrupted in between loses one."""
        with suppress(IndexError):
            while True:
                loan = self._ended.popleft()
                self._lent.pop(id(loan), None)
                yield loan.memory

    def lent(self) -> Iterator[Memory]:
        """What somebody refers to."""
        return (loan.memory for loan in self._lent.copy().values())

    def forget(self) -> None:
        """Nothing that is lent comes back: each memory goes with the last reference to it."""
        self._lent.clear()  # a weak reference that is gone tells nobody
