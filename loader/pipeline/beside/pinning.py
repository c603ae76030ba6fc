"""Page-locked slots: memory that another process fills, from which copies to a CUDA device start."""

from __future__ import annotations

import mmap
import os
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ...columns import AnyArray


class Locks(Protocol):
    """The part of a device's runtime that locks memory; ``CudaLocks`` is the real one."""

    def lock(self, address: int, nbytes: int) -> bool:
        """Lock memory, and return whether that succeeded."""
        ...

    def unlock(self, address: int) -> None: ...


class CudaLocks:
    """Locks memory for copies to one CUDA device."""

    def __init__(self, device: Any) -> None:
        import torch

        self._device = device
        self._runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]

    def lock(self, address: int, nbytes: int) -> bool:
        import torch

        with torch.cuda.device(self._device):
            return bool(self._runtime.cudaHostRegister(address, nbytes, 0) == self._runtime.cudaError.success)

    def unlock(self, address: int) -> None:
        from ..device import copy_stream

        copy_stream(self._device).synchronize()
        self._runtime.cudaHostUnregister(address)


class PinnedSlots:
    """Locks each slot as long as it is mapped. Used by the training loop's thread.

    A slot that cannot be locked is copied through the feeder's pinned buffers, as any other memory is. A forked child
    does not get what is locked: a fork would move pages away from under a copy.
    """

    def __init__(self, locks: Locks | None) -> None:
        self._locks = locks
        self._process = os.getpid()
        self._places: list[tuple[int, int]] = []  # where locked slots begin and end, in order

    def prepare(self, memory: AnyArray, pages: mmap.mmap) -> None:
        """Lock newly mapped memory, if there is a device."""
        if self._locks is None:
            return
        if hasattr(mmap, "MADV_DONTFORK"):
            pages.madvise(mmap.MADV_DONTFORK)
        address, nbytes = memory.ctypes.data, len(memory)
        if self._locks.lock(address, nbytes):
            place = address, address + nbytes
            self._places = sorted([*self._places, place])
            weakref.finalize(memory, self._forget, place).atexit = False

    def _forget(self, place: tuple[int, int]) -> None:
        self._places = [other for other in self._places if other != place]
        if self._locks is not None and self._process == os.getpid():  # a forked child has no part in it
            self._locks.unlock(place[0])

    def are_pinned(self, address: int, nbytes: int) -> bool:
        """Return whether these bytes are page-locked."""
        number = bisect_right(self._places, (address, 1 << 64)) - 1
        return number >= 0 and address + nbytes <= self._places[number][1]
