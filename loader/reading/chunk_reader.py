"""Chunks in memory: fetched in the order of first use, opened as columns, dropped after last use, within a budget.

Mutable state: the slots, the queues and the byte counts, all under one lock. Fetch threads fill slots, the assembler
thread asks for them. No thread is woken without work: a waking thread takes the GIL from a working one.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING

from ..counters import Counters, Levels
from ..errors import LoaderClosedError
from ..limits import usable_cores
from .chunk_memory import ChunkMemory
from .fetching import FetchQueue, FetchThreads, OpeningQueue, Slot

if TYPE_CHECKING:
    from ..columns import Block
    from .chunk_memory import Leases
    from .chunk_source import ChunkSource, Fetched

# Requests for each thread that keep it busy until more come, also while one of them takes long.
_QUEUED_PER_THREAD = 8


class ChunkReader:
    """Keeps requested chunks in memory, as far as ``budget_bytes`` allow; the shards' headers count too.

    Chunks are fetched in the order of ``request``, ahead of need, until the budget is full. If a needed chunk does not
    fit, resident chunks are evicted, the one with the furthest next use first (Belady 1966), and fetched again when
    their turn comes: a budget smaller than the open windows costs reads, never correctness. At most one chunk at a time
    is held beyond the budget, and only when nothing else can be evicted. ``set_read_ahead`` and ``set_threads`` may
    change at any time how much is fetched before it is asked for, and how many chunks at a time. With ``keeps_unused``,
    chunks that nobody asks for any more stay for later requests, until the first time that there is no room.
    """

    def __init__(
        self,
        source: ChunkSource,
        *,
        budget_bytes: int,
        threads: int,
        next_use: Callable[[Sequence[int]], dict[int, int]],
        counters: Counters,
        leases: Leases | None = None,
        keeps_unused: bool = False,
    ) -> None:
        self._source = source
        self._counters = counters
        self._slots: dict[int, Slot] = {}
        self._memory = ChunkMemory(
            self._slots, source, budget_bytes, next_use, counters, leases, keeps_unused=keeps_unused
        )
        self._queue = FetchQueue(self._slots)
        self._received = OpeningQueue(usable_cores())
        self._current: dict[int, None] = {}  # needed by the current span and not yet handed to it
        self._waiting_since: float | None = None  # the assembler waits for one of these, since this perf_counter()
        self._requested_bytes = 0
        self._read_ahead_bytes = budget_bytes
        self._waited_s = 0.0
        self._closed = False
        self._failure: BaseException | None = None  # of a fetch thread itself, not of a chunk
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # what fetch threads wait for: a chunk that has room
        self._arrived = threading.Condition(self._lock)  # what the assembler waits for: a chunk that it needs
        self._threads = FetchThreads(self._fetch_loop, threads)

    def start(self) -> None:
        """Start the threads; called once. The reader can be closed even if this fails midway."""
        self._threads.start()  # without the lock: an interrupt here may not leave it held

    def set_threads(self, threads: int) -> None:
        """Set how many chunks are fetched at a time. Surplus threads end after the chunk that they fetch."""
        with self._lock:
            self._threads.resize(threads)
            self._changed.notify_all()

    def set_read_ahead(self, nbytes: int) -> None:
        """Limit the bytes of chunks that are resident or in flight before a span asks for them; one is always allowed.

        Chunks that are in memory already stay there.
        """
        with self._lock:
            self._read_ahead_bytes = nbytes
            self._changed.notify_all()

    # -- called by the assembler ----------------------------------------------------------------------------------

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None:
        """Announce that these chunks will be needed, in order of first use; once for each window that they lie in.

        While chunks needed ``at_once`` keep many of the threads busy, no others are fetched: they get the bandwidth.
        """
        with self._lock:
            if self._closed:
                return
            for chunk in chunks:
                slot = self._slots.setdefault(chunk, Slot())
                slot.uses += 1
                if slot.uses == 1:
                    self._memory.note_used(chunk)
                    self._requested_bytes += self._source.hold(chunk)
                    if slot.block is None and not slot.in_flight:
                        self._queue.ask(chunk, at_once=at_once)
            self._wake()

    @property
    def has_room(self) -> bool:
        """True if more would fit than is requested so far."""
        return self._requested_bytes < self._memory.budget

    @property
    def keeps_unused(self) -> bool:
        """True if chunks that nobody asks for stay in memory."""
        return self._memory.keeps_unused

    @property
    def needs_requests(self) -> bool:
        """True if its threads may soon have nothing to fetch, though not every chunk was asked for."""
        is_all = len(self._slots) == self._source.manifest.num_chunks
        return not is_all and len(self._queue) < _QUEUED_PER_THREAD * self._threads.wanted

    def release(self, chunks: Sequence[int]) -> None:
        """Withdraw one request for each of these chunks; drop those without requests, unless unused ones are kept."""
        with self._lock:
            for chunk in () if self._closed else chunks:
                slot = self._slots[chunk]
                slot.uses -= 1
                if slot.uses == 0:
                    self._requested_bytes -= self._source.hold(chunk)
                    self._let_go_unused(chunk, slot)
            self._wake()

    def take(self, chunks: Sequence[int]) -> Iterator[tuple[int, Block | BaseException]]:
        """Yield each of these chunks once, as soon as it is in memory, or what its fetch raised."""
        with self._lock:
            self._refuse_closed()
            self._current = dict.fromkeys(chunks)
            for chunk in chunks:
                slot = self._slots[chunk]
                self._memory.note_taken(slot)
                if slot.block is None and slot.error is None and not slot.in_flight:
                    self._queue.hurry(chunk)
            self._wake()
        while self._current:
            with self._lock:
                loaded = self._wait_for_some()
            yield from loaded
            with self._lock:
                self._refuse_closed()
                for chunk, _ in loaded:
                    del self._current[chunk]
                self._wake()  # the chunks just used may now be evicted

    def _wait_for_some(self) -> list[tuple[int, Block | BaseException]]:
        """Wait for current chunks; returns one if others wait for its room, else all in memory. Holds the lock."""
        started = self._waiting_since = time.perf_counter()
        try:
            while True:
                self._refuse_closed()
                if self._failure is not None:
                    raise self._failure
                slots = ((chunk, self._slots[chunk]) for chunk in self._current)
                found = ((chunk, block) for chunk, slot in slots if (block := slot.block or slot.error) is not None)
                loaded = list(islice(found, 1 if self._queue.has_urgent else None))
                if loaded:
                    waited_s = time.perf_counter() - started
                    self._waited_s += waited_s
                    self._counters.add(chunk_wait_s=waited_s)
                    return loaded
                self._arrived.wait()
        finally:
            self._waiting_since = None

    def _refuse_closed(self) -> None:
        if self._closed:
            raise LoaderClosedError("the loader was closed while a batch was being read")

    def stop(self) -> None:
        """Start no more fetches, and wake all waiting threads."""
        with self._lock:
            self._closed = True
            self._threads.stop()
            self._queue.clear()
            self._received.clear()
            self._changed.notify_all()
            self._arrived.notify_all()

    def close(self, until: float) -> None:
        """Drop everything, and wait for the threads until ``time.monotonic()`` reaches ``until``.

        A request cannot be aborted: one that takes longer ends in its daemon thread, and its result is dropped.
        """
        self.stop()
        self._threads.join(until)
        with self._lock:
            self._slots.clear()
            self._current.clear()
            self._requested_bytes = 0
            self._memory.close()

    # -- any thread -----------------------------------------------------------------------------------------------

    def list_missing(self) -> tuple[list[int], float]:
        """The chunks that the assembler is waiting for, those in flight first, and how many seconds it has waited."""
        with self._lock:
            if self._waiting_since is None:
                return [], 0.0
            missing = sorted(self._current, key=lambda chunk: not self._slots[chunk].in_flight)
            return missing, time.perf_counter() - self._waiting_since

    @property
    def resident_bytes(self) -> int:
        return self._memory.resident_bytes

    def levels(self) -> Levels:
        """Count chunks that are queued, in flight and in memory; any thread may ask."""
        with self._lock:
            in_flight = sum(slot.in_flight for slot in self._slots.values())
            resident = sum(slot.block is not None for slot in self._slots.values())
            return Levels(
                queued_chunks=len(self._slots) - in_flight - resident,
                chunks_in_flight=in_flight,
                resident_chunks=resident,
                resident_bytes=self.resident_bytes,
                peak_bytes=self._memory.peak_bytes,
                fetch_threads=self._threads.wanted,
                read_ahead_bytes=self._read_ahead_bytes,
            )

    def spent(self) -> tuple[float, float]:
        """Seconds so far that the assembler waited for chunks, and that threads fetched, summed over them."""
        with self._lock:
            since = self._waiting_since
            return self._waited_s + (0.0 if since is None else time.perf_counter() - since), self._threads.busy_s()

    # -- the fetch threads ----------------------------------------------------------------------------------------

    def _fetch_loop(self) -> None:
        try:
            while True:
                with self._lock:
                    while self._threads.leaves() or (work := self._next_work()) is None:
                        if self._closed or self._threads.leaves():
                            self._wake()  # another one, if this was woken for a chunk
                            return
                        self._changed.wait()
                    self._wake()
                work()
        except BaseException as exc:  # noqa: BLE001 - raised by the assembler, which would wait forever
            with self._lock:
                self._failure = exc
                self._arrived.notify_all()

    def _wake(self) -> None:
        """Wake one thread if there is a chunk for it; that thread wakes the next. Holds the lock."""
        if self._received.has_one or (self._may_fetch and (self._queue.has_urgent or self._fits_ahead())):
            self._changed.notify()

    @property
    def _may_fetch(self) -> bool:
        """True if opening keeps up; a chunk that waits for it holds more than its bytes: headers."""
        return len(self._received) < self._threads.wanted

    def _fits_ahead(self) -> bool:
        """Return whether there is a chunk to fetch ahead of need, and room for it. Holds the lock."""
        chunk = self._queue.find_ahead(self._threads.wanted)
        if chunk is None:
            return False
        size = self._source.reserve(chunk)
        memory = self._memory
        is_within = not memory.untaken or memory.untaken + size <= self._read_ahead_bytes
        return is_within and (not memory.reserved or memory.fits_beside_used(size))

    def _next_work(self) -> Callable[[], None] | None:
        """Choose the calling thread's next work: open a chunk that was fetched, or fetch one. Holds the lock."""
        if self._received.has_one:
            self._threads.note(1)
            return partial(self._open, *self._received.take())
        chunk = self._next_admitted() if self._may_fetch else None
        return None if chunk is None else partial(self._fetch, chunk)

    def _next_admitted(self) -> int | None:
        """The chunk to fetch next, with its bytes reserved; None if there is none or no room for it. Holds the lock."""
        if self._closed:
            return None
        chunk = self._queue.find_urgent()
        if chunk is not None:
            size = self._source.reserve(chunk)
            self._memory.drop_unused(size)
            self._memory.make_room(size, self._current)
            if not self._memory.fits(size) and self._urgent_must_wait():
                return None
        elif self._fits_ahead():
            chunk = self._queue.find_ahead(self._threads.wanted)
            assert chunk is not None
            size = self._source.reserve(chunk)
            self._memory.drop_unused(size)
        else:
            return None
        self._queue.take(chunk)
        self._admit(self._slots[chunk], size)
        return chunk

    def _urgent_must_wait(self) -> bool:
        """Return whether a chunk in flight or unused will make room, or one is held beyond the budget already."""
        makes_room = any(self._slots[c].in_flight or self._slots[c].block is not None for c in self._current)
        return makes_room or self._memory.reserved > max(0, self._memory.budget)

    def _admit(self, slot: Slot, size: int) -> None:
        slot.in_flight = True
        self._threads.note(1)
        self._memory.resize(slot, size)

    def _let_go_unused(self, chunk: int, slot: Slot) -> None:
        """Drop or keep a chunk, maybe in flight, that nobody asks for any more. Holds the lock."""
        if self.keeps_unused and slot.block is not None:
            self._memory.keep_unused(chunk)
        elif not slot.in_flight:
            self._queue.forget(chunk)
            self._memory.let_go(self._slots.pop(chunk))

    def _fetch(self, chunk: int) -> None:
        try:
            fetched = self._source.fetch(chunk)
        except BaseException as exc:  # noqa: BLE001 - handed to the assembler, which raises it
            self._settle(chunk, None, exc)
            return
        with self._lock:
            self._threads.note(-1)
            self._queue.note_received(chunk)
            if not self._closed:
                self._received.put(chunk, fetched)

    def _open(self, chunk: int, fetched: Fetched | None) -> None:
        block: Block | None = None
        error: BaseException | None = None
        try:
            block = self._source.open(chunk, fetched)
        except BaseException as exc:  # noqa: BLE001 - handed to the assembler, which raises it
            error = exc
        with self._lock:
            self._received.end()
        self._settle(chunk, block, error)

    def _settle(self, chunk: int, block: Block | None, error: BaseException | None) -> None:
        """Record that a chunk is in memory, or why it is not."""
        with self._lock:
            self._threads.note(-1)
            self._queue.forget(chunk)
            slot = self._slots.get(chunk)
            if slot is not None:
                slot.in_flight = False
                self._memory.resize(slot, block.nbytes if block is not None else 0)
                slot.block, slot.error = block, error
                if slot.uses == 0:
                    self._let_go_unused(chunk, slot)
            if chunk in self._current:
                self._arrived.notify()
            self._wake()
