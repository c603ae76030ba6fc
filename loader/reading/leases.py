"""Leases of chunks: those that batches keep alive by views, and their bytes beside the chunks that are resident.

A view refers to an array over the chunk's bytes, which dies with the last view (`penstock.storage.memory.leases`).
Mutable state: the held buffers, under a lock, and the leases, which may end at any time.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from ...storage.memory.leases import MemoryLeases
from ..columns import Block, BytesColumn

_MOST_BYTES = 1 << 31  # offsets in Arrow's views have 32 bits


@dataclass(slots=True)
class _Held:
    nbytes: int
    exporters: int = 0
    is_resident: bool = True
    last: tuple[weakref.ref[memoryview], weakref.ref[Any]] | None = None  # a buffer, and its exporter

    def exporter_of(self, buffer: memoryview) -> Any:
        """The array that was made over a buffer, None where it is dead or another one was made since."""
        return self.last[1]() if self.last is not None and self.last[0]() is buffer else None


def owner_of(buffer: memoryview) -> tuple[int, int]:
    """Identify the memory that a view of ``buffer`` keeps alive, for as long as it lives, and return its bytes."""
    owner: Any = buffer.obj
    if not isinstance(owner, pa.Buffer):
        return id(owner), memoryview(owner).nbytes
    while owner.parent is not None:
        owner = owner.parent
    return owner.address, owner.size


class Leases:
    """Lends buffers of chunks to batches, ``limit_bytes`` of them at most. Any thread may call any method."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._held: dict[int, _Held] = {}  # by the owner of the bytes, which lives as long as an exporter
        self._leases: MemoryLeases[int] = MemoryLeases()  # of owners, one for each exporter
        self._lent_bytes = 0
        self._retained_bytes = 0
        self._lock = threading.RLock()  # a collection of garbage may close this loader at any allocation

    def lend(self, buffer: memoryview) -> memoryview | None:
        """A read-only buffer of the same bytes whose views are counted; None where the limit is reached: copy then."""
        owner, nbytes = owner_of(buffer)
        with self._lock:
            held = self._held.get(owner)
            exporter: Any = None if held is None else held.exporter_of(buffer)
            if exporter is not None:
                return memoryview(exporter)
            self._settle()
            held = self._held.get(owner)
            if held is None:
                if nbytes >= _MOST_BYTES or self._lent_bytes + nbytes > self._limit_bytes:
                    return None
                held = self._held[owner] = _Held(nbytes)
                self._lent_bytes += nbytes
            held.exporters += 1
            exporter = np.frombuffer(buffer, np.uint8)
            exporter.flags.writeable = False
            held.last = weakref.ref(buffer), self._leases.lend(owner, exporter)
            return memoryview(exporter)

    def drop(self, block: Block) -> None:
        """Note that the reader released this block: from now on, the part that batches hold counts."""
        with self._lock:
            self._settle()
            owners = {owner_of(c.buffer)[0] for c in block.columns.values() if isinstance(c, BytesColumn)}
            for owner in owners:
                held = self._held.get(owner)
                if held is not None and held.is_resident:
                    held.is_resident = False
                    self._retained_bytes += held.nbytes

    @property
    def retained_bytes(self) -> int:
        """Bytes of chunks that only batches hold."""
        with self._lock:
            self._settle()
            return self._retained_bytes

    def _settle(self) -> None:
        """Take back what dead exporters held. Holds the lock."""
        for owner in self._leases.reclaim():
            held = self._held[owner]
            held.exporters -= 1
            if held.exporters == 0:
                del self._held[owner]
                self._lent_bytes -= held.nbytes
                if not held.is_resident:
                    self._retained_bytes -= held.nbytes
