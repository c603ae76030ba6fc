"""Fetching and opening of chunks: a chunk's state, which is next, and the threads that do it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...storage.threads.interruptible import Thread

if TYPE_CHECKING:
    from ..columns import Block
    from .chunk_source import Fetched


@dataclass(slots=True)
class Slot:
    """A chunk that is needed. It holds ``reserved`` bytes of the budget while it is in flight or resident."""

    uses: int = 0
    is_taken: bool = False  # a span has asked for it
    queued: bool = False
    in_flight: bool = False
    reserved: int = 0
    block: Block | None = None
    error: BaseException | None = None


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


class FetchThreads:
    """Daemon threads that all run ``loop``. Every method but ``start`` and ``join`` is called under the owner's lock.

    A thread of ``loop`` asks ``leaves`` between two chunks, and returns if it does.
    """

    def __init__(self, loop: Callable[[], None], wanted: int) -> None:
        self._loop = loop
        self.wanted = wanted
        self._threads: list[Thread] = []
        self._is_started = False
        self._busy = 0
        self._busy_s = 0.0  # summed over the threads, until _counted_until
        self._counted_until = 0.0

    def start(self) -> None:
        self._is_started = True
        self.resize(self.wanted)

    def resize(self, wanted: int) -> None:
        """Set the number of threads, at once if they run; surplus threads end after their current work.

        Raises:
            RuntimeError: no more threads can be started.
        """
        self.wanted = wanted
        while self._is_started and len(self._threads) < wanted:
            name = f"penstock-fetch-{len(self._threads)}"
            thread = Thread(target=self._loop, name=name)
            self._threads.append(thread)  # before it runs, so that it finds itself here
            try:
                thread.start()
            except RuntimeError:  # the machine gives no more
                self._threads.remove(thread)
                self.wanted = max(1, len(self._threads))
                raise

    def leaves(self) -> bool:
        """Return whether the calling thread is one too many; it is then removed from the pool."""
        current = threading.current_thread()
        if current in self._threads and len(self._threads) > self.wanted:
            self._threads.remove(current)
        return current not in self._threads

    def stop(self) -> None:
        """Start no more threads."""
        self._is_started = False

    def join(self, until: float) -> None:
        """Wait for the threads until ``time.monotonic()`` reaches ``until``."""
        for thread in list(self._threads):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def note(self, change: int) -> None:
        """Record that ``change`` more threads fetch now."""
        now = time.perf_counter()
        self._busy_s += self._busy * (now - self._counted_until)
        self._counted_until = now
        self._busy += change

    def busy_s(self) -> float:
        """Seconds so far that threads fetched and opened chunks, summed over them."""
        self.note(0)
        return self._busy_s


class OpeningQueue:
    """Queue in the order in which the bytes came. It has no lock: callers hold the reader's."""

    def __init__(self, at_once: int) -> None:
        """Let ``at_once`` threads open chunks at a time."""
        self._at_once = at_once
        self._opening = 0
        self._waiting: deque[tuple[int, Fetched | None]] = deque()

    def put(self, chunk: int, fetched: Fetched | None) -> None:
        self._waiting.append((chunk, fetched))

    @property
    def has_one(self) -> bool:
        """True if there is a chunk to open and a thread may open it."""
        return bool(self._waiting) and self._opening < self._at_once

    def __len__(self) -> int:
        """Number of chunks that wait."""
        return len(self._waiting)

    def take(self) -> tuple[int, Fetched | None]:
        """The chunk that came first; ``end`` follows."""
        self._opening += 1
        return self._waiting.popleft()

    def end(self) -> None:
        """Record that a chunk that was taken is open, or cannot be opened."""
        self._opening -= 1

    def clear(self) -> None:
        """Open nothing more."""
        self._waiting.clear()
