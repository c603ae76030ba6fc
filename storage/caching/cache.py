"""A cache of byte ranges on the node's disk, shared by every process and job of one user.

An entry is one requested range, stored under the hash of (root, key, ETag, range), which its checksum covers; entries
of a changed object are never found again and age out. A reader that misses takes the entry's lock, looks again, and
only then fetches, so a node fetches once. The locks are `flock`s, which the kernel releases however a process dies. A
full or failing disk costs speed, never the run.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from ..store import ByteRange, ObjectInfo, Store
from .disk import CacheDisk

_LOG = logging.getLogger(__name__)
_Views = list[memoryview]  # inside the class, list is a verb


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheCounts:
    """Counts of the cache since the store was opened; ``uncached`` counts reads that could not be stored."""

    hits: int
    misses: int
    hit_bytes: int
    miss_bytes: int
    uncached: int
    corrupt: int


class CacheStore:
    """A store that caches reads from another one. Mutable state: the counts, under a lock; the rest is on disk."""

    def __init__(
        self, inner: Store, folder: str | Path, limit_bytes: int | None = None, *, identity: str | None = None
    ) -> None:
        """Wrap a store; closing this one closes it too.

        ``limit_bytes`` applies to all jobs that share the folder; None means nine tenths of the space that is free or
        already used by the cache. ``identity`` distinguishes stores with the same URL; the default is the URL.

        Raises:
            CacheFullError: the folder can't be made or written.
            AccessDeniedError: the folder belongs to another user, or others may write to it.
        """
        self._inner = inner
        self._identity = identity or inner.url
        self._arguments = (str(folder), limit_bytes)
        self._disk = CacheDisk(Path(folder), limit_bytes)
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(CacheCounts.__slots__, 0)
        self._reported_corrupt = 0  # of the corrupt entries, by ``close``

    def __reduce__(self) -> tuple[Callable[..., CacheStore], tuple[Store, str, int | None, str]]:
        return (_rebuild, (self._inner, *self._arguments, self._identity))

    def __repr__(self) -> str:
        return f"CacheStore({self._inner!r}, {self._arguments[0]!r})"

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def inner(self) -> Store:
        """The store whose reads are cached."""
        return self._inner

    @property
    def counts(self) -> CacheCounts:
        """Counts of the cache so far."""
        with self._lock:
            return CacheCounts(**self._counts)

    def add_up(self) -> dict[str, int]:
        """The counts under the names that they have beside those of other layers."""
        counts = self.counts
        return {f"cache_{name}": getattr(counts, name) for name in CacheCounts.__slots__}

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        """Read from the disk or else from the wrapped store, which is first asked for the ETag if none is given."""
        etag = etag or self._inner.head(key).etag
        if etag is None:  # nothing distinguishes one version from the next
            self._count("uncached")
            return self._inner.get(key, byte_range)
        name = self._name(key, byte_range, etag)
        data = self._look(name)
        if data is not None:
            return data
        with self._disk.lock(name) as locked:
            if locked:
                data = self._look(name)
                if data is not None:
                    return data
            data = self._inner.get(key, byte_range, etag=etag)
            self._keep(name, data)
        return data

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> _Views:
        """Read ranges; one call of the wrapped store fetches the missing ones that no other reader is fetching."""
        etag = etag or self._inner.head(key).etag
        if etag is None:
            self._count("uncached")
            return self._inner.get_ranges(key, ranges)
        names = [self._name(key, byte_range, etag) for byte_range in ranges]
        found = {name: data for name in dict.fromkeys(names) if (data := self._look(name)) is not None}
        wanted = {name: byte_range for name, byte_range in zip(names, ranges, strict=True) if name not in found}
        with ExitStack() as locks:
            mine: dict[str, ByteRange] = {}
            for name, byte_range in wanted.items():
                # Waiting for one lock while holding another could deadlock, so a taken one is left for later.
                if locks.enter_context(self._disk.lock(name, wait_s=0)):
                    data = self._look(name)
                    if data is None:
                        mine[name] = byte_range
                    else:
                        found[name] = data
            if mine:
                fetched = self._inner.get_ranges(key, tuple(mine.values()), etag=etag)
                for name, data in zip(mine, fetched, strict=True):
                    self._keep(name, data)
                    found[name] = data
        for name, byte_range in wanted.items():
            if name not in found:
                found[name] = self.get(key, byte_range, etag=etag)
        return [found[name] for name in names]

    def discard(self, key: str, byte_range: ByteRange | None = None, *, etag: str) -> None:
        """Forget a range whose content proved to be wrong: the next read fetches it again."""
        self._disk.discard(self._name(key, byte_range, etag))

    def head(self, key: str) -> ObjectInfo:
        return self._inner.head(key)

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return self._inner.list(prefix)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        return self._inner.put(key, data)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        return self._inner.put_if(key, data, etag=etag)

    def delete(self, keys: Sequence[str]) -> None:
        self._inner.delete(keys)

    def close(self) -> None:
        self._inner.close()
        self._disk.close()
        corrupt, self._reported_corrupt = self.counts.corrupt - self._reported_corrupt, self.counts.corrupt
        if corrupt > 1:
            _LOG.warning("the cache of %s had %d corrupt entries; check its disk", self.url, corrupt)

    def _name(self, key: str, byte_range: ByteRange | None, etag: str) -> str:
        span = "whole" if byte_range is None else f"{byte_range.start}-{byte_range.stop}"
        text = "\0".join((self._identity, key, etag, span))
        return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=16).hexdigest()

    def _look(self, name: str) -> memoryview | None:
        data, corrupt = self._disk.read(name)
        if corrupt and self._count("corrupt") == 1:
            _LOG.warning("the cache of %s has a corrupt entry; such entries are fetched again", self.url)
        if data is not None:
            self._count("hits", "hit_bytes", len(data))
        return data

    def _keep(self, name: str, data: memoryview) -> None:
        self._count("misses", "miss_bytes", len(data))
        if not self._disk.write(name, data):
            self._count("uncached")

    def _count(self, what: str, bytes_what: str | None = None, size_bytes: int = 0) -> int:
        """Add one to a count, which is returned, and to another one the bytes."""
        with self._lock:
            self._counts[what] += 1
            if bytes_what is not None:
                self._counts[bytes_what] += size_bytes
            return self._counts[what]


def _rebuild(inner: Store, folder: str, limit_bytes: int | None, identity: str) -> CacheStore:
    return CacheStore(inner, folder, limit_bytes, identity=identity)
