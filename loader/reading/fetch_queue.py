"""Choose the chunk to fetch next: first those waited for, then those asked for ahead, in order of first use."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .slot import Slot

# Threads that hide a store's own time for each request. Those beside them are for requests on their way along the line,
# so they say how long that is.
SERVED = 16
# However few threads there are, the line is free once the first batch keeps no more of them busy.
_BUSY = 2


class FetchQueue:
    """Queue of the chunks in ``slots`` that are to be fetched. It has no lock: callers hold the reader's.

    Mutable state: the two queues, whose entries may be out of date, and which chunks the first batch waits for.
    """

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        self._slots = slots
        self._ahead: deque[int] = deque()
        self._urgent: deque[int] = deque()
        self._at_once: set[int] = set()
        self._to_come: set[int] = set()  # those of them whose bytes are not there

    def __len__(self) -> int:
        """Number of chunks to fetch ahead of need, about."""
        return len(self._ahead)

    def ask(self, chunk: int, *, at_once: bool = False) -> None:
        """Fetch it ahead of need, after those that were asked for before."""
        self._slots[chunk].queued = True
        self._ahead.append(chunk)
        if at_once:
            self._at_once.add(chunk)
            self._to_come.add(chunk)

    def hurry(self, chunk: int) -> None:
        """Fetch it before all chunks that are not waited for."""
        self._slots[chunk].queued = False  # its entry in the queue ahead is passed over
        self._urgent.append(chunk)

    @property
    def has_urgent(self) -> bool:
        """True if somebody waits for a chunk; it may have arrived meanwhile, and ``find_urgent`` skips it then."""
        return bool(self._urgent)

    def find_urgent(self) -> int | None:
        """The first chunk that is waited for and neither in memory nor in flight."""
        while self._urgent:
            slot = self._slots.get(self._urgent[0])
            if slot is not None and not slot.in_flight and slot.block is None and slot.error is None:
                return self._urgent[0]
            self._urgent.popleft()
        return None

    def find_ahead(self, threads: int) -> int | None:
        """The first chunk that is asked for ahead; none while those needed at once have the bandwidth.

        They have it while they keep more than a quarter of the threads busy; with many threads until so few are still
        to come that others would arrive after them.
        """
        while self._ahead:
            slot = self._slots.get(self._ahead[0])
            if slot is not None and slot.queued:
                is_free = len(self._at_once) <= max(_BUSY, threads // 4)
                is_next = is_free or len(self._to_come) < (threads - SERVED) // 4
                return self._ahead[0] if is_next or self._ahead[0] in self._at_once else None
            self._ahead.popleft()
        return None

    def take(self, chunk: int) -> None:
        """Record that the chunk that was found is in flight."""
        self._slots[chunk].queued = False
        queue = self._urgent if self._urgent and self._urgent[0] == chunk else self._ahead
        queue.popleft()

    def note_received(self, chunk: int) -> None:
        """Record that its bytes have arrived."""
        self._to_come.discard(chunk)

    def forget(self, chunk: int) -> None:
        """Record that the first batch no longer waits for it: it has arrived, or is not wanted."""
        self._at_once.discard(chunk)
        self._to_come.discard(chunk)

    def clear(self) -> None:
        """Fetch nothing more."""
        self._ahead.clear()
        self._urgent.clear()
