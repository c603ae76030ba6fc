"""An in-memory store for tests, of this package and of its users, with configurable latency, bandwidth and faults.

``open_store("mem://name/prefix")`` opens the same objects anywhere in the process, and in no other.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from .checks import changed_before_write, check_etag, check_inside, check_key, check_length, where
from .errors import NotFoundError, StorageError, UnsupportedURLError
from .ranges import read_ranges
from .store import ByteRange, ObjectInfo

_BUCKETS: dict[str, _Bucket] = {}
_BUCKETS_LOCK = threading.Lock()
_VERBS = ("get", "head", "list", "put", "put_if", "delete")


@dataclass(frozen=True, slots=True)
class Call:
    """One request as the store saw it: the verb (that of the store's method), the key, the range of a get."""

    verb: str
    key: str
    byte_range: ByteRange | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """Fault of one request: a delay, an error, a short response, or a change of the object during the read."""

    delay_s: float = 0.0
    error: Callable[[str], StorageError] | None = None
    keep_bytes: int | None = None
    change_to: bytes | None = None

    def __post_init__(self) -> None:
        if self.delay_s < 0 or (self.keep_bytes is not None and self.keep_bytes < 0):
            raise ValueError(f"{self}: delay_s and keep_bytes may not be negative")


class _Bucket:
    """State that all stores of one name share. Mutable state: everything, under ``lock``."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.lock = threading.Lock()
        self.objects: dict[str, tuple[bytes, str]] = {}  # key -> (content, ETag)
        self.exists = False
        self.latency_s = 0.0
        self.bytes_per_s: float | None = None
        self.faults: dict[str, deque[Fault]] = {}
        self.calls: list[Call] = []
        self.running = 0
        self.most_running = 0


class MemoryStore:
    """Objects of one bucket in this process, below the prefix that the URL names."""

    def __init__(self, url: str | None = None) -> None:
        """Open ``mem://name[/prefix]``; without a URL, a new, empty and private bucket."""
        if url is None:
            self._bucket, self._prefix = _Bucket(f"anonymous-{id(self):x}"), ""
            self._bucket.exists = True
        else:
            scheme, _, rest = url.partition("://")
            name, _, prefix = rest.partition("/")
            if scheme != "mem" or not name:
                raise UnsupportedURLError(f"{url!r} names no store in memory; write mem://name or mem://name/prefix")
            with _BUCKETS_LOCK:
                self._bucket = _BUCKETS.setdefault(name, _Bucket(name))
            prefix = prefix.strip("/")
            self._prefix = prefix + "/" if prefix else ""

    def __reduce__(self) -> tuple[type[MemoryStore], tuple[str]]:
        return (MemoryStore, (self.url,))

    def __repr__(self) -> str:
        return f"MemoryStore({self.url!r})"

    @property
    def url(self) -> str:
        return f"mem://{self._bucket.name}/{self._prefix}".rstrip("/")

    # What a test sets and inspects.

    def create(self) -> MemoryStore:
        """Create an empty bucket; the first put does so too."""
        self._bucket.exists = True
        return self

    def drop(self) -> None:
        """Delete the bucket with its faults and its calls."""
        bucket = self._bucket
        with bucket.lock:
            bucket.objects.clear()
            bucket.faults.clear()
            bucket.calls.clear()
            bucket.exists, bucket.latency_s, bucket.bytes_per_s = False, 0.0, None
            bucket.most_running = bucket.running
        with _BUCKETS_LOCK:
            if _BUCKETS.get(bucket.name) is bucket:
                del _BUCKETS[bucket.name]

    def slow_down(self, *, latency_s: float = 0.0, bytes_per_s: float | None = None) -> None:
        """Delay every request by ``latency_s`` and transfer its bytes at ``bytes_per_s`` (None: instantly)."""
        if latency_s < 0 or (bytes_per_s is not None and bytes_per_s <= 0):
            raise ValueError(f"slow_down(latency_s={latency_s}, bytes_per_s={bytes_per_s}): needs >= 0 and > 0")
        self._bucket.latency_s, self._bucket.bytes_per_s = latency_s, bytes_per_s

    def inject(self, fault: Fault, *, times: int = 1, verb: str = "get") -> None:
        """Apply ``fault`` to the next ``times`` requests of a verb, after those already injected."""
        if verb not in _VERBS:
            raise ValueError(f"inject(verb={verb!r}): has to be one of {', '.join(_VERBS)}")
        with self._bucket.lock:
            self._bucket.faults.setdefault(verb, deque()).extend([fault] * times)

    @property
    def calls(self) -> list[Call]:
        """Every request so far, of all stores on this bucket, in the order in which they began."""
        with self._bucket.lock:
            return list(self._bucket.calls)

    @property
    def most_running(self) -> int:
        """The largest number of requests that ran at one time."""
        return self._bucket.most_running

    # The store.

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        check_key(self.url, key)
        fault = self._begin("get", key, byte_range)
        try:
            data, now = self._find(key)
            check_etag(self.url, key, etag, now)
            if byte_range is None:
                piece = data
            else:
                check_inside(self.url, key, byte_range, len(data))
                piece = data[byte_range.start : byte_range.stop]
            wanted = len(piece)
            self._wait(fault, wanted)
            if fault is not None and fault.change_to is not None:
                self._bucket.objects[self._prefix + key] = (fault.change_to, _etag(fault.change_to))
            if etag is not None:
                check_etag(self.url, key, etag, self._find(key)[1])
            if fault is not None and fault.keep_bytes is not None:
                piece = piece[: fault.keep_bytes]
            check_length(self.url, key, byte_range, wanted, len(piece))
            return memoryview(piece)
        finally:
            self._end()

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        return read_ranges(lambda r: self.get(key, r, etag=etag), ranges)

    def head(self, key: str) -> ObjectInfo:
        check_key(self.url, key)
        fault = self._begin("head", key)
        try:
            self._wait(fault, 0)
            data, etag = self._find(key)
            return ObjectInfo(key, len(data), etag)
        finally:
            self._end()

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        fault = self._begin("list", prefix)
        try:
            self._wait(fault, 0)
            if not self._bucket.exists:
                raise NotFoundError(
                    f"there is no bucket mem://{self._bucket.name}; put something first, or create() it"
                )
            start, cut = self._prefix + prefix, len(self._prefix)
            with self._bucket.lock:
                found = [(key, content) for key, content in self._bucket.objects.items() if key.startswith(start)]
            return iter([ObjectInfo(key[cut:], len(data), etag) for key, (data, etag) in sorted(found)])
        finally:
            self._end()

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        return self._put("put", key, data, lambda found: None)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        def check(found: str | None) -> None:
            if found != etag:
                raise changed_before_write(self.url, key, etag)

        return self._put("put_if", key, data, check)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(self.url, key)
        if not keys:
            return
        fault = self._begin("delete", keys[0])
        try:
            self._wait(fault, 0)
            with self._bucket.lock:
                for key in keys:
                    self._bucket.objects.pop(self._prefix + key, None)
        finally:
            self._end()

    def close(self) -> None:
        """Do nothing: the objects stay until drop()."""

    def _put(
        self, verb: str, key: str, data: bytes | bytearray | memoryview, check: Callable[[str | None], None]
    ) -> ObjectInfo:
        check_key(self.url, key)
        copy = bytes(data)
        info = ObjectInfo(key, len(copy), _etag(copy))
        fault = self._begin(verb, key)
        try:
            self._wait(fault, len(copy))
            with self._bucket.lock:
                check(self._bucket.objects.get(self._prefix + key, (b"", None))[1])
                self._bucket.objects[self._prefix + key] = (copy, info.etag or "")
                self._bucket.exists = True
            return info
        finally:
            self._end()

    def _begin(self, verb: str, key: str, byte_range: ByteRange | None = None) -> Fault | None:
        bucket = self._bucket
        with bucket.lock:
            bucket.calls.append(Call(verb, self._prefix + key, byte_range))
            bucket.running += 1
            bucket.most_running = max(bucket.most_running, bucket.running)
            waiting = bucket.faults.get(verb)
            return waiting.popleft() if waiting else None

    def _end(self) -> None:
        with self._bucket.lock:
            self._bucket.running -= 1

    def _wait(self, fault: Fault | None, moved_bytes: int) -> None:
        bucket = self._bucket
        delay_s = bucket.latency_s + (0.0 if bucket.bytes_per_s is None else moved_bytes / bucket.bytes_per_s)
        if fault is not None:
            delay_s += fault.delay_s
        if delay_s > 0:
            time.sleep(delay_s)
        if fault is not None and fault.error is not None:
            raise fault.error(f"injected fault at {self.url}")

    def _find(self, key: str) -> tuple[bytes, str]:
        try:
            return self._bucket.objects[self._prefix + key]
        except KeyError:
            raise NotFoundError(f"there is no object {where(self.url, key)}") from None


def _etag(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=8).hexdigest()
