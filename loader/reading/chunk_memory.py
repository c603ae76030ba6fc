"""Memory of a reader's chunks, within a budget: reserved, evicted, leased to batches, and released."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ...storage.memory.buffers import BUFFERS
from ...storage.memory.leases import MemoryLeases
from ..columns import Block, BytesColumn

if TYPE_CHECKING:
    from ..counters import Counters
    from .chunk_source import ChunkSource
    from .fetching import Slot


class ChunkMemory:
    """Counts the bytes of ``slots``, of headers and of what batches keep. It has no lock: callers hold the reader's.

    Mutable state: the reserved bytes, their peak, and how many of them no span has asked for. With ``keeps_unused``,
    which ends the first time that room runs out, also the chunks that nobody asks for any more, and their bytes.
    """

    def __init__(
        self,
        slots: MutableMapping[int, Slot],
        source: ChunkSource,
        budget_bytes: int,
        next_use: Callable[[Sequence[int]], dict[int, int]],
        counters: Counters,
        leases: Leases | None,
        *,
        keeps_unused: bool,
    ) -> None:
        self._slots = slots
        self._source = source
        self._budget_bytes = budget_bytes
        self._next_use = next_use
        self._counters = counters
        self._leases = leases
        self._idle = BUFFERS.allow()  # as much as the budget has left
        self._peak = 0
        self._unused: set[int] = set()
        self._unused_bytes = 0
        self.keeps_unused = keeps_unused
        self.reserved = 0
        self.untaken = 0  # reserved bytes of chunks that no span has asked for yet

    @property
    def budget(self) -> int:
        """Bytes left for chunks beside the headers and the chunks that batches keep alive."""
        return self._budget_bytes - self._source.header_bytes - self._retained_bytes

    @property
    def _retained_bytes(self) -> int:
        return 0 if self._leases is None else self._leases.retained_bytes

    @property
    def resident_bytes(self) -> int:
        return self.reserved + self._retained_bytes

    @property
    def peak_bytes(self) -> int:
        return self._peak

    def fits(self, size: int) -> bool:
        """Return whether ``size`` more bytes stay within the budget."""
        return self.reserved + size <= self.budget

    def fits_beside_used(self, size: int) -> bool:
        """Return whether ``size`` more bytes would stay within the budget without the chunks that nobody asks for."""
        return self.fits(size - self._unused_bytes)

    def resize(self, slot: Slot, size: int) -> None:
        """Change the bytes that are reserved for a chunk."""
        growth, slot.reserved = size - slot.reserved, size
        self.reserved += growth
        self.untaken += 0 if slot.is_taken else growth
        self._peak = max(self._peak, self.resident_bytes)
        self._idle.set(self.budget - self.reserved)

    def note_taken(self, slot: Slot) -> None:
        """Record that a span asks for a chunk."""
        if not slot.is_taken:
            slot.is_taken = True
            self.untaken -= slot.reserved

    def let_go(self, slot: Slot) -> None:
        """Release a chunk's block."""
        if self._leases is not None and slot.block is not None:
            self._leases.drop(slot.block)
        slot.block = None
        self.resize(slot, 0)

    def keep_unused(self, chunk: int) -> None:
        """Keep a resident chunk that nobody asks for any more until somebody does, or room runs out."""
        self._unused.add(chunk)
        self._unused_bytes += self._slots[chunk].reserved

    def note_used(self, chunk: int) -> None:
        """Record that an unused chunk is asked for again."""
        if chunk in self._unused:
            self._unused.remove(chunk)
            self._unused_bytes -= self._slots[chunk].reserved

    def drop_unused(self, size: int) -> None:
        """Drop the chunks that nobody asks for if ``size`` more bytes do not fit, and keep none from then on."""
        if self.fits(size):
            return
        self.keeps_unused = False
        for chunk in self._unused:
            self.let_go(self._slots.pop(chunk))
        self._unused.clear()
        self._unused_bytes = 0

    def make_room(self, size: int, needed: Mapping[int, None]) -> None:
        """Drop resident chunks but those ``needed`` now, the furthest next use first, until ``size`` bytes fit."""
        wanted = self.reserved + size - self.budget
        if wanted <= 0:
            return
        held = ((c, slot) for c, slot in self._slots.items() if slot.reserved and slot.block is not None)
        candidates = [c for c, _ in held if c not in needed]
        uses = self._next_use(candidates) if candidates else {}
        for chunk in sorted(candidates, key=lambda c: uses[c], reverse=True):
            if wanted <= 0:
                break
            slot = self._slots[chunk]
            wanted -= slot.reserved
            self.note_used(chunk)  # headers may have taken room since ``drop_unused``: it is no longer one of those
            self.let_go(slot)
            self._counters.add(evicted_chunks=1)

    def close(self) -> None:
        """Stop counting, and return idle memory."""
        self.reserved = self.untaken = self._unused_bytes = 0
        self._unused.clear()
        self._idle.close()


_MOST_BYTES = 1 << 31  # offsets in Arrow's views have 32 bits


@dataclass(slots=True)
class _Held:
    """A chunk that batches keep alive."""

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
