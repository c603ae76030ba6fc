"""Retries what may succeed later: exponential back-off with full jitter, a deadline, one limit per host, hedged reads.

Full jitter: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from .daemon_pool import DaemonPool, PoolClosedError
from .errors import StorageError, StoreUnavailableError, ThrottledError
from .hedge import LatencyBook, Race
from .limiter import limiter_of
from .ranges import coalesce, split
from .store import ByteRange, ObjectInfo, Store

T = TypeVar("T")
_Views = list[memoryview]  # inside the class, list is a verb

# Requests of one get_ranges that run concurrently.
RANGES_AT_ONCE = 8
CLOSE_TIMEOUT_S = 1.0
# A request that may be hedged runs in another thread, which costs some 20 microseconds: not worth it below this p95.
WORTH_HEDGING_S = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """How long and how often requests are tried, and how many run concurrently.

    ``deadline_s`` covers a call with all its tries. A try in progress is not interrupted, so a call may take one client
    timeout longer. ``hedge_share`` limits second requests to a share of all requests; 0 turns hedging off. A second
    request is sent when the first has taken longer than the 95th percentile and ``hedge_floor_s``.
    """

    deadline_s: float = 120.0
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    max_running: int = 64
    hedge_share: float = 0.05
    hedge_floor_s: float = 0.02

    def __post_init__(self) -> None:
        if self.deadline_s < 0 or not 0 <= self.first_delay_s <= self.max_delay_s:
            raise ValueError(f"{self}: needs deadline_s >= 0 and 0 <= first_delay_s <= max_delay_s")
        if self.max_running < 1 or not 0 <= self.hedge_share <= 1 or self.hedge_floor_s < 0:
            raise ValueError(f"{self}: needs max_running >= 1, hedge_share in [0, 1] and hedge_floor_s >= 0")


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryCounts:
    """Requests, and what was done beyond one request per call, since the store was opened."""

    requests: int
    retries: int
    throttled: int
    hedges: int
    hedges_won: int


class RetryStore:
    """A store that retries requests to another one. Mutable state: counts and latencies, under their locks; threads."""

    def __init__(
        self,
        inner: Store,
        config: RetryConfig | None = None,
        *,
        host: str | None = None,
    ) -> None:
        """Wrap a store; closing this one closes it too. Stores of the same ``host`` share one limit of requests."""
        self._inner = inner
        self._config = config or RetryConfig()
        self._host = host or inner.url
        self._limiter = limiter_of(self._host, self._config.max_running)
        self._latencies = LatencyBook()
        self._pool = DaemonPool(f"penstock-requests {inner.url}")
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._requests = self._retries = self._throttled = self._hedges = self._hedges_won = 0

    def __reduce__(self) -> tuple[Callable[..., RetryStore], tuple[Store, RetryConfig, str]]:
        return (_rebuild, (self._inner, self._config, self._host))

    def __repr__(self) -> str:
        return f"RetryStore({self._inner!r})"

    @property
    def url(self) -> str:
        return self._inner.url

    @property
    def counts(self) -> RetryCounts:
        """The counts so far."""
        with self._lock:
            return RetryCounts(
                requests=self._requests,
                retries=self._retries,
                throttled=self._throttled,
                hedges=self._hedges,
                hedges_won=self._hedges_won,
            )

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        size = None if byte_range is None else len(byte_range)
        return self._try(lambda: self._inner.get(key, byte_range, etag=etag), hedge_bytes=size)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> _Views:
        requests = coalesce(ranges)
        if len(requests) < 2:
            return split(requests, [self.get(key, request.byte_range, etag=etag) for request in requests], ranges)
        buffers: list[memoryview | None] = [None] * len(requests)
        errors: list[BaseException] = []
        waiting = iter(range(len(requests)))
        lock, ended = threading.Lock(), threading.Semaphore(0)

        def read_some() -> None:
            try:
                while not errors:
                    with lock:
                        i = next(waiting, None)
                    if i is None:
                        break
                    buffers[i] = self.get(key, requests[i].byte_range, etag=etag)
            except BaseException as exc:  # noqa: BLE001 - raised again in the caller's thread
                errors.append(exc)
            finally:
                ended.release()

        readers = min(RANGES_AT_ONCE, len(requests))
        for _ in range(readers - 1):
            self._submit(read_some)
        read_some()
        for _ in range(readers):
            ended.acquire()
        if errors:
            raise errors[0]
        return split(requests, [buffer for buffer in buffers if buffer is not None], ranges)

    def head(self, key: str) -> ObjectInfo:
        return self._try(lambda: self._inner.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        # Clients list eagerly, so an error is raised here, and the whole listing is retried.
        return self._try(lambda: self._inner.list(prefix))

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        return self._try(lambda: self._inner.put(key, data))

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        return self._try(lambda: self._inner.put_if(key, data, etag=etag))

    def delete(self, keys: Sequence[str]) -> None:
        self._try(lambda: self._inner.delete(keys))

    def close(self) -> None:
        """End the waits between tries and the threads, then close the wrapped store."""
        self._closing.set()
        self._pool.close(CLOSE_TIMEOUT_S)
        self._inner.close()

    def _try(self, call: Callable[[], T], *, hedge_bytes: int | None = None) -> T:
        config = self._config
        started = time.monotonic()
        tries = 0
        while True:
            left_s = config.deadline_s - (time.monotonic() - started)
            if self._closing.is_set() or not self._limiter.acquire(left_s):
                raise self._give_up(None, tries, started)
            tries += 1
            try:
                return self._ask(call, hedge_bytes)
            except StorageError as exc:
                if isinstance(exc, ThrottledError):
                    self._limiter.note_throttled()
                    with self._lock:
                        self._throttled += 1
                if not exc.transient:
                    raise
                failure = exc
            delay_s = random.uniform(0, min(config.max_delay_s, config.first_delay_s * 2.0 ** min(tries - 1, 60)))
            out_of_time = time.monotonic() - started + delay_s > config.deadline_s
            if out_of_time or self._closing.wait(delay_s):
                raise self._give_up(failure, tries, started) from failure
            with self._lock:
                self._retries += 1

    def _ask(self, call: Callable[[], T], hedge_bytes: int | None) -> T:
        """Send one request, whose place in the limiter the caller holds, and perhaps a second one."""
        with self._lock:
            self._requests += 1
        if hedge_bytes is None or self._config.hedge_share == 0:
            try:
                result = call()
            finally:
                self._limiter.release()
            self._limiter.note_success()
            return result
        started = time.monotonic()
        p95_s = self._latencies.p95_s(hedge_bytes)
        if p95_s is None or p95_s < WORTH_HEDGING_S:
            try:
                result = call()
            finally:
                self._limiter.release()
        else:
            result = self._race(call, max(p95_s, self._config.hedge_floor_s))
        self._latencies.add(hedge_bytes, time.monotonic() - started)
        self._limiter.note_success()
        return result

    def _race(self, call: Callable[[], T], hedge_after_s: float) -> T:
        race = Race(self._submit, call)
        try:
            race.start(self._limiter.release)
        except StorageError:
            self._limiter.release()
            raise
        if not race.wait(hedge_after_s):
            if self._may_hedge():
                try:
                    race.start(self._limiter.release)
                except StorageError:  # closed meanwhile: the first request still finishes
                    self._limiter.release()
            race.wait(None)
        if race.winner == 1:
            with self._lock:
                self._hedges_won += 1
        return race.outcome()

    def _submit(self, job: Callable[[], None]) -> None:
        try:
            self._pool.submit(job)
        except PoolClosedError as exc:
            raise StorageError(f"{self.url} is closed; open the store again") from exc

    def _may_hedge(self) -> bool:
        """Take a place for a second request if the budget allows one and the host has a free place."""
        with self._lock:
            if self._hedges + 1 > self._requests * self._config.hedge_share:
                return False
            if not self._limiter.acquire(0):
                return False
            self._hedges += 1
            return True

    def _give_up(self, failure: StorageError | None, tries: int, started: float) -> StorageError:
        took = f"tried {tries} times in {time.monotonic() - started:.1f} s"
        if self._closing.is_set():
            return StorageError(f"{self.url} was closed while a request waited; {took}")
        if failure is None:
            return StoreUnavailableError(
                f"{self.url}: no place for another request within {self._config.deadline_s} s; {took}; "
                f"{self._limiter.running} requests run, {self._limiter.limit} may"
            )
        error = type(failure)(f"{failure}; {took}, the deadline is {self._config.deadline_s} s")
        error.transient = failure.transient
        return error


def _rebuild(inner: Store, config: RetryConfig, host: str) -> RetryStore:
    return RetryStore(inner, config, host=host)
