"""The interface of assemblers, which plan, gather and deliver batches in order, and the queue that they deliver to."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np

from ...storage.threads.interruptible import Condition
from ..decoding.batch import UnfinishedBatch
from ..errors import LoaderClosedError

if TYPE_CHECKING:
    from ...storage.threads.interruptible import Event
    from ..columns import Block, IntArray
    from ..counters import Counters
    from ..decoding.batch import BatchMaker
    from ..order.mixture import Lap
    from ..order.outputs import Cursors
    from ..order.plan import Order, Share
    from ..order.spans import Span
    from ..reading.chunk_memory import Leases
    from ..reading.chunk_source import ChunkSource
    from .tuning import PipelineOptions


_MOST_ON_CALL = 64
_MOST_COPIED_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class Delivery:
    """A batch of any type, with the samples and positions that it consumes; or, ``is_end``, the end of an epoch.

    ``ids`` are the sample ids of the rows that count; ``start`` to ``stop`` are the positions of the global batch.
    ``logged`` is what an audit's log holds of these rows, where that is not their ids. Where samples are dropped:
    ``dropped`` are the ids of those that this rank passed over to get to its own, ``left`` of those that fill no batch;
    ``is_last`` that no batch follows in the epoch. ``replaced`` (n, 2): those of ``logged``, or else ``ids``, that are
    bad, and their substitutes. ``laps``: the place of each source of a mixture after it, where that is not
    arithmetic.
    """

    epoch: int
    start: int
    stop: int
    ids: IntArray
    nbytes: int
    batch: Any
    logged: IntArray | None = None
    dropped: IntArray | None = None
    left: IntArray | None = None
    replaced: IntArray | None = None
    is_last: bool = False
    laps: Sequence[Lap] | None = None
    is_end: bool = False

    @classmethod
    def end_of(cls, epoch: int, start: int, stop: int) -> Delivery:
        """Make the end of an epoch, which has no batch."""
        return cls(epoch, start, stop, np.empty(0, np.int64), 0, None, is_end=True)

    def with_batch(self, batch: Any, replaced: IntArray | None) -> Delivery:
        """Copy it with another batch. Once a batch: ``dataclasses.replace`` takes five times as long."""
        return Delivery(
            self.epoch,
            self.start,
            self.stop,
            self.ids,
            self.nbytes,
            batch,
            self.logged,
            self.dropped,
            self.left,
            replaced,
            self.is_last,
            self.laps,
            self.is_end,
        )


class DeliveryQueue:
    """A bounded queue from one producing thread to one consuming thread.

    It holds up to ``max_bytes``, but always takes two deliveries, so that one is being made while the other waits. Of
    batches that are made when they are asked for, it holds about those of a span: nothing is gained by more. Once it is
    full of those, it takes no other before half are gone: each turn between the two threads costs more than to put one
    in. Of batches that are only copied from chunks in memory it holds 32 MiB: so their memory is used again while it is
    in the cores' caches.
    """

    def __init__(self, max_bytes: int, max_items: int = 256) -> None:
        self._items: deque[Delivery] = deque()
        self._max_bytes = max_bytes
        self._max_items = max_items
        self._bytes = 0
        self._error: BaseException | None = None
        self._interruption: BaseException | None = None
        self._closed = False
        self._blocked: Delivery | None = None  # the delivery that the producing thread waits to put in
        self._changed = Condition()

    def limit(self, max_bytes: int) -> None:
        """Hold at most ``max_bytes`` from now on; deliveries in the queue stay."""
        with self._changed:
            self._max_bytes = max_bytes
            self._unblock()

    def put(self, item: Delivery) -> bool:
        """Wait for room and add; returns False if the queue is closed."""
        with self._changed:
            self._blocked = item if self._is_full(item) else None
            while not self._closed and self._blocked is not None:
                self._changed.wait()
            if self._closed:
                return False
            self._items.append(item)
            self._bytes += item.nbytes
            self._changed.notify_all()
            return True

    def _unblock(self) -> None:
        """Wake the producing thread once its delivery fits. Holds the lock."""
        if self._blocked is not None and not self._is_full(self._blocked, most_on_call=_MOST_ON_CALL // 2 + 1):
            self._changed.notify_all()
            self._blocked = None  # last: if Ctrl-C comes between the two, the next batch that is taken wakes it

    def _is_full(self, item: Delivery, most_on_call: int = _MOST_ON_CALL) -> bool:
        waiting = len(self._items)
        if waiting >= most_on_call and _is_on_call(item):
            return True
        return waiting >= self._max_items or (waiting >= 2 and self._bytes + item.nbytes > self._most_bytes(item))

    def _most_bytes(self, item: Delivery) -> int:
        """Choose the bytes that may wait together with a delivery."""
        is_copied = isinstance(item.batch, UnfinishedBatch) and item.batch.is_copied
        return min(self._max_bytes, _MOST_COPIED_BYTES) if is_copied else self._max_bytes

    def fail(self, error: BaseException) -> None:
        """End the queue: the consumer gets the deliveries in it, then the error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def interrupt(self, error: BaseException | None) -> None:
        """Raise an error from outside at once, before the deliveries in the queue; None withdraws it."""
        with self._changed:
            self._interruption = error
            self._changed.notify_all()

    def get(self) -> Delivery:
        """Wait for the next delivery. Raises the producer's error, or LoaderClosedError if the queue is closed."""
        with self._changed:
            while self._interruption is not None or not self._items:
                if self._interruption is not None:
                    raise self._interruption
                if self._error is not None:
                    raise self._error
                if self._closed:
                    raise LoaderClosedError("the loader was closed while it waited for a batch")
                self._changed.wait()
            item = self._items.popleft()
            self._bytes -= item.nbytes
            self._unblock()
            return item

    def begin(self, count: int) -> None:
        """Have the next ``count`` deferred batches made; called by the consuming thread."""
        with self._changed:
            coming = [item.batch for item in islice(self._items, count)]
        for batch in coming:
            if isinstance(batch, UnfinishedBatch):
                batch.begin()

    def __len__(self) -> int:
        return len(self._items)

    def is_short(self) -> bool:
        """Return whether the queue is less than half full; any thread may ask."""
        with self._changed:
            waiting = len(self._items)
            if waiting < 2:
                return True
            last = self._items[-1]
            most = _MOST_ON_CALL if _is_on_call(last) else self._max_items
            return 2 * waiting < most and 2 * self._bytes < self._most_bytes(last)

    def count(self) -> tuple[int, int]:
        """Count (batches that wait here, those of them that could be taken at once, in order); any thread may ask."""
        with self._changed:
            batches = [item.batch for item in self._items if not item.is_end]
        is_pending = (isinstance(batch, UnfinishedBatch) and not batch.is_done for batch in batches)
        ready = next((place for place, pending in enumerate(is_pending) if pending), len(batches))
        return len(batches), ready

    def close(self) -> None:
        """Cancel and drop the waiting batches, and wake both threads."""
        with self._changed:
            self._closed = True
            for item in self._items:
                if isinstance(item.batch, UnfinishedBatch):
                    item.batch.cancel()
            self._items.clear()
            self._changed.notify_all()


def _is_on_call(item: Delivery) -> bool:
    return isinstance(item.batch, UnfinishedBatch) and item.batch.is_on_call


MOST_AT_ONCE = 64  # steps that are gathered together
_NEVER = 1 << 62

W = TypeVar("W")
G = TypeVar("G")


@dataclass(frozen=True, kw_only=True)
class Start:
    """The point to deliver from, ``position`` of ``epoch`` in ``order``, and the share of global batches."""

    order: Order
    share: Share
    epoch: int
    position: int
    cursors: Cursors | None = None  # of a stream, where the position is not an epoch's beginning


class ReadsChunks(Protocol):
    """The part of a ``ChunkReader`` that assemblers use, by joint chunk numbers or by one source's own."""

    @property
    def has_room(self) -> bool: ...

    @property
    def needs_requests(self) -> bool: ...

    @property
    def keeps_unused(self) -> bool: ...

    def request(self, chunks: Sequence[int], *, at_once: bool = False) -> None: ...

    def release(self, chunks: Sequence[int]) -> None: ...

    def take(self, chunks: Sequence[int]) -> Iterator[tuple[int, Block | BaseException]]: ...


@dataclass(frozen=True, kw_only=True)
class Equipment:
    """A pipeline's threads and buffers, lent to its assembler.

    ``deliver`` waits for room in the queue of batches, and returns False once the pipeline is stopped; ``stopping`` is
    set then. ``is_short``: few batches are in the queue. Everything here ends with the pipeline.
    """

    source: ChunkSource
    reader: ReadsChunks
    maker: BatchMaker
    leases: Leases | None
    options: PipelineOptions
    counters: Counters
    stopping: Event
    deliver: Callable[[Delivery], bool]
    is_short: Callable[[], bool]


class Assembler(Protocol):
    """Decides what each batch consists of. One thread of the pipeline runs it."""

    def run(self) -> None:
        """Deliver batches and ends of epochs from the start on, until ``deliver`` returns False.

        An error that it raises is raised again where the next batch is waited for.
        """

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """Map each resident chunk to its next use, after the rows being gathered: smaller is sooner.

        Called by the reader's threads, to evict, while ``run`` waits for chunks.
        """

    def fail(self, error: Exception) -> None:
        """Receive the error that replaces the next batch. Called by the thread that waits for batches."""

    def waiting_for(self) -> dict[str, Any] | None:
        """Describe what ``run`` waits for now, other than chunks, as in ``Pipeline.activity``. Called by any thread."""


def steps_at_once(options: PipelineOptions, rows: int, row_bytes: int) -> int:
    """Choose the most steps that are gathered together, each of about ``rows`` rows on a rank."""
    return int(min(MOST_AT_ONCE, max(1, options.span_bytes // (max(1, rows) * row_bytes))))


def pick_uses(chunks: Sequence[int], uses: Mapping[int, int]) -> dict[int, int]:
    """Pick the next use of each chunk; those that are in no window come last."""
    return {chunk: uses.get(chunk, _NEVER) for chunk in chunks}


@contextmanager
def time_assembly(counters: Counters, **amounts: float) -> Iterator[None]:
    """Count the block's time as assembling, with ``amounts``, but not waits for chunks; nothing if it raises."""
    waited, started = counters.totals().chunk_wait_s, time.perf_counter()
    yield
    waited = counters.totals().chunk_wait_s - waited
    busy = max(0.0, time.perf_counter() - started - waited)
    counters.add(since=started, assemble_s=busy, **amounts)


def gather_apart(
    work: W, gather: Callable[[W], G], split: Callable[[W], Sequence[W]], stopping: Event
) -> Iterator[tuple[W, G]]:
    """Yield some work with what is gathered for it; where that fails, its parts one after another.

    So the batches before the one that needs what failed are delivered.
    """
    parts: Sequence[W] = ()
    try:
        gathered = gather(work)
    except Exception:
        parts = split(work)
        if len(parts) == 1 or stopping.is_set():
            raise
    if not parts:
        yield work, gathered
    for part in parts:
        yield from gather_apart(part, gather, split, stopping)


def hand_over(equipment: Equipment, item: Delivery, since: float) -> bool:
    """Deliver a batch that was begun at ``since`` (``time.perf_counter()``); False where the pipeline is stopped."""
    delivered = equipment.deliver(item)
    if not delivered:
        item.batch.cancel()
    equipment.counters.add(backpressure_s=time.perf_counter() - since)
    return delivered


class CanCut(Protocol):
    """Rows of a span."""

    def cut(self, start: int, stop: int) -> Self: ...

    def pick(self, indices: Sequence[int]) -> Self: ...


R = TypeVar("R", bound=CanCut)


def cut_step(rows: R, span: Span, step: int, share: Share) -> tuple[R, int, int]:
    """Cut one step's rows out of a span, repeated where the batch is padded; count the batch's, and the valid ones.

    A step without rows gets a copy of one of another's, of which none makes the batch: a transform shows its fields by
    it.
    """
    low, high = int(span.row_starts[step]), int(span.row_starts[step + 1])
    num_valid = int(span.num_valid[step])
    batch_rows = rows.cut(low, high) if high > low else rows.pick([0])
    num_rows = max(num_valid, share.batch_size) if share.pad else num_valid
    if num_rows > high - low:
        batch_rows = batch_rows.pick([i % (high - low) for i in range(num_rows)])
    return batch_rows, num_rows, num_valid
