"""Reads a shard from front to back in ranged GETs, ahead of its reader, and skips what is not read."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from types import TracebackType
from typing import Protocol

from ...storage import ByteRange, ObjectInfo, Store
from ...storage.threads.daemon_pool import DaemonPool

WINDOW_BYTES = 4 << 20
# Reading on is cheaper than a request of its own up to about this gap (20 ms of latency at 100 MB/s).
HOP_BYTES = 2 << 20
# What is read where a hop lands: a header, and the small members that often stand beside a large one.
LANDING_BYTES = 64 << 10
READ_AHEAD = 3


class Windows(Protocol):
    """A window that moves forward over bytes."""

    @property
    def end(self) -> int:
        """The number of bytes; final once a read came up short."""
        ...

    def read(self, offset: int, at_least: int = 1) -> memoryview:
        """The bytes from ``offset`` on: ``at_least`` many or those up to the end, mostly more."""
        ...


class PieceWindows:
    """A window over a stream of pieces, each of which is seen once."""

    def __init__(self, pieces: Iterator[memoryview]) -> None:
        self._pieces = pieces
        self._start = 0
        self._window = memoryview(b"")

    @property
    def end(self) -> int:
        return self._start + len(self._window)

    def read(self, offset: int, at_least: int = 1) -> memoryview:
        while offset + at_least > self.end:
            piece = next(self._pieces, None)
            if piece is None:
                break
            kept = self._window[max(0, offset - self._start) :]
            self._start = self.end - len(kept)
            self._window = memoryview(b"".join((kept, piece))) if len(kept) else piece
        return self._window[max(0, offset - self._start) :]


class ShardWindows:
    """A moving window over one shard; used by one thread.

    Up to READ_AHEAD requests are in flight while the shard is read without hops; they run in threads of this object,
    which ``close`` ends. Mutable state: the last window, the next request's length, the pool and what it is reading.
    """

    def __init__(self, store: Store, shard: ObjectInfo, window_bytes: int = WINDOW_BYTES) -> None:
        self._store = store
        self._shard = shard
        self._full = window_bytes
        self._length = window_bytes
        self._start = 0
        self._stop = 0
        self._window = memoryview(b"")
        self._ahead: dict[int, Future[memoryview]] = {}
        self._pool: DaemonPool | None = None

    @property
    def end(self) -> int:
        """The shard's length."""
        return self._shard.size

    def read(self, offset: int, at_least: int = 1) -> memoryview:
        """The bytes from ``offset`` on: ``at_least`` many or those up to the shard's end, mostly more.

        ``offset`` never goes back behind the one before.

        Raises: what ``Store.get`` raises.
        """
        pieces = [self._window[offset - self._start :]] if offset < self._stop else []
        at = max(offset, self._stop) if pieces else offset
        wanted = min(offset + at_least, self.end)
        while at < wanted:
            pieces.append(self._read_on(at))
            at += len(pieces[-1])
            self._stop = at
        self._start = offset
        self._window = pieces[0] if len(pieces) == 1 else memoryview(b"".join(pieces))
        return self._window

    def _read_on(self, at: int) -> memoryview:
        """One request's bytes from ``at``, which is where the last ended or later."""
        hop = at - self._stop > HOP_BYTES
        while self._ahead and not hop:
            start = next(iter(self._ahead))
            window = self._ahead.pop(start).result()
            self._fill(start + len(window))
            if at < start + len(window):
                return window[at - start :]
        if hop:
            self._drop()
        self._length = LANDING_BYTES if hop else min(2 * self._length, self._full)
        window = self._get(at, min(self.end, at + self._length))
        if self._length == self._full:
            self._fill(at + len(window))
        return window

    def _get(self, start: int, stop: int) -> memoryview:
        return self._store.get(self._shard.key, ByteRange(start, stop), etag=self._shard.etag)

    def _fill(self, start: int) -> None:
        """Have READ_AHEAD requests in flight, from ``start`` on or from where those in flight end."""
        start = max((begin + self._full for begin in self._ahead), default=start)
        while len(self._ahead) < READ_AHEAD and start < self._shard.size:
            if self._pool is None:
                self._pool = DaemonPool("penstock-window", READ_AHEAD)
            self._ahead[start] = self._pool.submit(self._get, start, min(start + self._full, self._shard.size))
            start += self._full

    def _drop(self) -> None:
        for future in self._ahead.values():
            future.cancel()
        self._ahead.clear()

    def close(self) -> None:
        """Wait for the requests in flight, and end the threads."""
        self._drop()
        if self._pool is not None:
            self._pool.close(cancel=True)
            self._pool = None

    def __enter__(self) -> ShardWindows:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()
