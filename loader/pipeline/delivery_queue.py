"""Deliveries, which are batches and ends of epochs in their order, and the queue that hands them over."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage.threads.interruptible import Condition
from ..decoding.batch import UnfinishedBatch
from ..errors import LoaderClosedError

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..order.mixture import Lap
    from ..order.outputs import Cursors

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
    arithmetic; ``cursors``, from another process, those of each source's lanes there.
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
    cursors: Sequence[Cursors | None] | None = None
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
            self.cursors,
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
