"""Memory of a reader's chunks, within a budget: reserved, evicted, released, and given to idle buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from ...storage.memory.buffers import BUFFERS

if TYPE_CHECKING:
    from ..metrics import Counters
    from .chunk_source import ChunkSource
    from .leases import Leases
    from .slot import Slot


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
