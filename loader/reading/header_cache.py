"""Cache of shards' headers (parquet footers, say) to open chunks with: each is read by one thread, within a budget."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...storage import ByteRange, DiscardingStore, ObjectInfo, Store
from ..errors import FormatError

if TYPE_CHECKING:
    from ..formats.shard import ShardFormat
    from ..metrics import Counters

ENTRY_BYTES = 300  # what a shard takes beside its header: a lock, and its place in the table; measured


_Range = tuple[str, ByteRange | None, str]  # an object's key, a part of it, its ETag


class _NotingStore:
    """Reads from a store, which may cache, and notes the ranges that it reads."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.ranges: list[_Range] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        if etag is not None:
            self.ranges.append((key, byte_range, etag))
        return self._inner.get(key, byte_range, etag=etag)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        if etag is not None:
            self.ranges += [(key, byte_range, etag) for byte_range in ranges]
        return self._inner.get_ranges(key, ranges, etag=etag)


class _Entry:
    """One shard's header, opened under ``lock``. None is a header too, hence ``is_open``."""

    __slots__ = ("header", "is_open", "lock", "nbytes", "ranges")

    def __init__(self) -> None:
        self.ranges: list[_Range] = []  # what was read for it of a store that keeps it
        self.lock = threading.Lock()
        self.is_open = False
        self.header: Any = None
        self.nbytes = ENTRY_BYTES


class HeaderCache:
    """Opens each shard when it is first asked for, and keeps its header. Called by any thread.

    Headers take ``budget_bytes`` at most, by their own ``nbytes``: those that were not asked for longest are dropped,
    and read again when they are needed. One header is kept whatever its size.

    Threads that ask for a shard while another one opens it wait for that one. Mutable state: the entries and their
    sum of bytes, under a lock, and each entry under its own.
    """

    def __init__(self, shard_format: ShardFormat, store: Store, counters: Counters, *, budget_bytes: int) -> None:
        self._format = shard_format
        self._store = store
        self._counters = counters
        self._budget = budget_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one unused for longest first
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all headers, as their formats estimate them."""
        return self._nbytes

    def limit(self, budget_bytes: int) -> None:
        """Change the budget; headers beyond a smaller one are dropped at once."""
        with self._lock:
            self._budget = budget_bytes
            self._evict()

    def get(self, shard: ObjectInfo) -> Any:
        """The shard's header, as the format's ``open_shard`` returned it.

        Raises what ``open_shard`` raises. A failure is not kept, nor are damaged bytes by the store: each thread that
        waited, and each later call, opens the shard again.
        """
        with self._lock:
            entry = self._entries.get(shard.key)
            if entry is None:
                entry = self._entries[shard.key] = _Entry()
                self._nbytes += entry.nbytes
                self._evict()
            self._entries.move_to_end(shard.key)
        with entry.lock:
            if not entry.is_open:
                entry.header = self._open(entry, shard)
                entry.is_open = True
                self._count(shard.key, entry)
            return entry.header

    def _open(self, entry: _Entry, shard: ObjectInfo) -> Any:
        if not isinstance(self._store, DiscardingStore):
            return self._format.open_shard(self._store, shard)
        store: Any = _NotingStore(self._store)
        entry.ranges = store.ranges
        try:
            return self._format.open_shard(store, shard)
        except FormatError:
            self._discard(entry)
            raise

    def _discard(self, entry: _Entry) -> None:
        """Make the store fetch the bytes of an entry again."""
        if isinstance(self._store, DiscardingStore):
            for key, byte_range, etag in entry.ranges:
                self._store.discard(key, byte_range, etag=etag)

    def has(self, shard: ObjectInfo) -> bool:
        """Return whether the shard's header is in the cache."""
        with self._lock:
            entry = self._entries.get(shard.key)
            return entry is not None and entry.is_open

    def forget(self, shard: ObjectInfo) -> None:
        """Have the shard fetched and opened again when it is next asked for, past what the store keeps.

        A thread that is opening it keeps that for itself.
        """
        with self._lock:
            entry = self._entries.pop(shard.key, None)
            if entry is None:
                return
            self._nbytes -= entry.nbytes
        self._discard(entry)

    def _count(self, key: str, entry: _Entry) -> None:
        """Add an opened header's bytes, unless it was forgotten or dropped meanwhile."""
        with self._lock:
            if entry.header is not None and self._entries.get(key) is entry:
                entry.nbytes += entry.header.nbytes
                self._nbytes += entry.header.nbytes
                self._evict()

    def _evict(self) -> None:
        """Drop what was unused for longest until the rest fits. Holds the lock."""
        dropped = 0
        while self._nbytes > self._budget and len(self._entries) > 1:
            _, entry = self._entries.popitem(last=False)
            self._nbytes -= entry.nbytes
            dropped += entry.nbytes > ENTRY_BYTES
        if dropped:
            self._counters.add(evicted_headers=dropped)
