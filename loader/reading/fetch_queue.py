"""Which chunk is fetched next: first those that are waited for, then what is asked for ahead, in order of first use."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from .slot import Slot

# Of the threads. Of a store that is far away, fewer would leave the line empty for a round trip; more share it with
# what the first batch waits for.
_MANY = 0.375


class FetchQueue:
    """Those of the chunks in ``slots`` that are to be fetched. It has no lock: who calls holds the reader's.

    Mutable state: the two queues, whose entries may be out of date, and which chunks the first batch waits for.
    """

    def __init__(self, slots: Mapping[int, Slot]) -> None:
        self._slots = slots
        self._ahead: deque[int] = deque()
        self._urgent: deque[int] = deque()
        self._at_once: set[int] = set()

    def ask(self, chunk: int, *, at_once: bool = False) -> None:
        """Fetch it ahead of need, after those that were asked for before."""
        self._slots[chunk].queued = True
        self._ahead.append(chunk)
        if at_once:
            self._at_once.add(chunk)

    def hurry(self, chunk: int) -> None:
        """Fetch it before all that nobody waits for."""
        self._slots[chunk].queued = False  # its entry in the queue ahead is passed over
        self._urgent.append(chunk)

    @property
    def has_urgent(self) -> bool:
        """Whether somebody waits for a chunk, maybe one that has come meanwhile; ``find_urgent`` passes those over."""
        return bool(self._urgent)

    def find_urgent(self) -> int | None:
        """The first chunk that is waited for and neither there nor on its way."""
        while self._urgent:
            slot = self._slots.get(self._urgent[0])
            if slot is not None and not slot.in_flight and slot.block is None and slot.error is None:
                return self._urgent[0]
            self._urgent.popleft()
        return None

    def find_ahead(self, threads: int) -> int | None:
        """The first chunk that is asked for ahead; none while those needed at once keep many threads busy."""
        while self._ahead:
            slot = self._slots.get(self._ahead[0])
            if slot is not None and slot.queued:
                is_held_back = len(self._at_once) > _MANY * threads and self._ahead[0] not in self._at_once
                return None if is_held_back else self._ahead[0]
            self._ahead.popleft()
        return None

    def take(self, chunk: int) -> None:
        """The chunk that was found is on its way."""
        self._slots[chunk].queued = False
        queue = self._urgent if self._urgent and self._urgent[0] == chunk else self._ahead
        queue.popleft()

    def forget(self, chunk: int) -> None:
        """It needs the line no longer: its bytes are there, or not wanted."""
        self._at_once.discard(chunk)

    def clear(self) -> None:
        """Fetch nothing more."""
        self._ahead.clear()
        self._urgent.clear()
