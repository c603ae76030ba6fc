"""Retries what may succeed later: exponential back-off with full jitter, a deadline, one limit per host, hedged reads.

Full jitter: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog, 2015.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeVar

from ..errors import (
    AccessDeniedError,
    NoCredentialsError,
    NotFoundError,
    StorageError,
    StoreTimeoutError,
    StoreUnavailableError,
    StoreUnreachableError,
    ThrottledError,
)
from ..ranges import coalesce, split
from ..store import ByteRange, ObjectInfo, Store
from ..threads.daemon_pool import DaemonPool, PoolClosedError
from ..threads.interruptible import Event
from .adaptive_timeout import AdaptiveTimeout, TimedStore, TimeLimit
from .hedge import HedgeBudget, LatencyBook, Race
from .limiter import limiter_of

T = TypeVar("T")
_Views = list[memoryview]  # inside the class, list is a verb

# Requests of one get_ranges that run concurrently.
RANGES_AT_ONCE = 8
CLOSE_TIMEOUT_S = 1.0
# A request that may be hedged runs in another thread, which costs some 20 microseconds: not worth it below this p95.
WORTH_HEDGING_S = 1e-3
# A store that breaks off by itself is given so much longer than its limit before its request is abandoned.
GRACE_S = 2.0
# A store that never responded at all is not waited for through the whole deadline: the address is probably wrong.
FIRST_CONTACT_S = 8.0
WARN_EVERY_S = 30.0
# Retries of a healthy store's answers that may be transient (a gateway's, while keys or nodes change).
DOUBTED = 2

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class RetryConfig:
    """Limits on the time, number and concurrency of tries.

    ``deadline_s`` covers a call with all its tries. A try is broken off after ``idle_timeout_s`` without a byte, or
    when the whole response comes at less than ``min_bytes_per_s``: after 12 s for up to 4 MiB, 24 s for up to 16 MiB,
    and so on in doublings. The next try gets twice the time, and so does every try while a whole host is slow. A
    try that begins within the deadline may end after it. Calls that last longer than ``warn_after_s`` are logged as
    warnings.

    A second request is sent when the first takes three times the 95th percentile of its size's latencies and at least
    ``hedge_floor_s``, or a quarter of its time where no latencies are known. ``hedge_share`` limits second requests
    that do not win to a share of all requests; 0 turns them off.
    """

    deadline_s: float = 120.0
    idle_timeout_s: float = 8.0
    min_bytes_per_s: float = float(1 << 20)
    first_delay_s: float = 0.1
    max_delay_s: float = 10.0
    max_running: int = 64
    hedge_share: float = 0.05
    hedge_floor_s: float = 0.02
    warn_after_s: float = 10.0

    def __post_init__(self) -> None:
        if self.deadline_s < 0 or not 0 <= self.first_delay_s <= self.max_delay_s:
            raise ValueError(f"{self}: needs deadline_s >= 0 and 0 <= first_delay_s <= max_delay_s")
        if not self.idle_timeout_s > 0 or not self.min_bytes_per_s > 0 or self.warn_after_s < 0:
            raise ValueError(f"{self}: needs idle_timeout_s > 0, min_bytes_per_s > 0 and warn_after_s >= 0")
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
    """A store that retries requests to another one.

    Mutable state: counts, latencies, budget and timeout, under their locks; threads. A request that was abandoned, or
    lost to a second one, keeps its thread and its place in the limit until its time is over, also past ``close()``.
    """

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
        self.limiter = limiter_of(self._host, self._config.max_running)
        self._latencies = LatencyBook()
        self._budget = HedgeBudget(self._config.hedge_share)
        self._timeout = AdaptiveTimeout(self._config.idle_timeout_s, self._config.min_bytes_per_s)
        self._timed = inner if isinstance(inner, TimedStore) else None
        self._reached = self._granted = False
        self._warned_at = float("-inf")
        self._pool = DaemonPool(f"penstock-requests {inner.url}")
        self._closing = Event()
        self._lock = threading.Lock()
        self._requests = self._retries = self._throttled = 0

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
                requests=self._requests + self._budget.sent,
                retries=self._retries,
                throttled=self._throttled,
                hedges=self._budget.sent,
                hedges_won=self._budget.won,
            )

    def add_up(self) -> dict[str, int]:
        """The counts under the names that they have beside those of other layers."""
        counts = self.counts
        return {
            "requests": counts.requests,
            "retries": counts.retries,
            "throttled_requests": counts.throttled,
            "hedges": counts.hedges,
            "hedges_won": counts.hedges_won,
        }

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        def ask(store: Store) -> memoryview:
            return store.get(key, byte_range, etag=etag)

        is_indexed = etag is not None
        if byte_range is None:
            return self._try(ask, size_bytes=None, find_size=lambda: self._inner.head(key).size, is_indexed=is_indexed)
        return self._try(ask, size_bytes=len(byte_range), is_hedged=True, is_indexed=is_indexed)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> _Views:
        requests = coalesce(ranges)
        if len(requests) < 2:
            return split(requests, [self.get(key, request.byte_range, etag=etag) for request in requests], ranges)
        buffers: list[memoryview | None] = [None] * len(requests)
        errors: list[BaseException] = []
        waiting = iter(range(len(requests)))
        lock, ended = threading.Lock(), SimpleQueue[None]()

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
                ended.put(None)

        readers = 1
        with suppress(RuntimeError):  # the machine gives no more threads: fewer do
            while readers < min(RANGES_AT_ONCE, len(requests)):
                self._submit(read_some)
                readers += 1
        read_some()
        for _ in range(readers):
            ended.get()
        if errors:
            raise errors[0]
        return split(requests, [buffer for buffer in buffers if buffer is not None], ranges)

    def head(self, key: str) -> ObjectInfo:
        return self._try(lambda store: store.head(key))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        # Clients list eagerly, so an error is raised here, and the whole listing is retried.
        return self._try(lambda store: store.list(prefix), size_bytes=None)

    def put(self, key: str, data: bytes | bytearray | memoryview) -> ObjectInfo:
        return self._try(lambda store: store.put(key, data), size_bytes=memoryview(data).nbytes, is_sent=True)

    def put_if(self, key: str, data: bytes | bytearray | memoryview, *, etag: str | None) -> ObjectInfo:
        size = memoryview(data).nbytes
        return self._try(lambda store: store.put_if(key, data, etag=etag), size_bytes=size, is_sent=True)

    def delete(self, keys: Sequence[str]) -> None:
        self._try(lambda store: store.delete(keys))

    def close(self) -> None:
        """End the waits between tries and the threads, then close the wrapped store."""
        self._closing.set()
        self._pool.close(CLOSE_TIMEOUT_S)
        self._inner.close()

    def _try(
        self,
        ask: Callable[[Store], T],
        *,
        size_bytes: int | None = 0,
        find_size: Callable[[], int] | None = None,
        is_hedged: bool = False,
        is_sent: bool = False,
        is_indexed: bool = False,
    ) -> T:
        """Ask until there is a response. ``is_sent``: the bytes go to the store, which is silent for as long.

        ``is_indexed``: the object was there, so that it is asked for again before it counts as absent.
        """
        config = self._config
        started = time.monotonic()
        tries = doubted = 0
        while True:
            deadline_s = self._timeout.deadline_s(config.deadline_s, size_bytes)
            left_s = deadline_s - (time.monotonic() - started)
            if self._closing.is_set() or not self.limiter.acquire(left_s):
                raise self._give_up(None, tries, started, deadline_s)
            tries += 1
            limit = self._timeout.limit(size_bytes, tries, left_s)
            if is_sent:
                limit = TimeLimit(limit.total_s, limit.total_s)
            try:
                return self._ask(ask, limit, size_bytes if is_hedged else None)
            except StorageError as exc:
                self._note_failure(exc)
                if not exc.transient and not (self._granted and isinstance(exc, NoCredentialsError)):
                    if doubted == DOUBTED or not self._is_doubtful(exc, is_indexed):
                        raise
                    doubted += 1
                failure = exc
            if size_bytes is None and find_size is not None and isinstance(failure, StoreTimeoutError):
                with suppress(StorageError):
                    size_bytes = find_size()
            if not self._reached and isinstance(failure, StoreUnreachableError):
                deadline_s = min(deadline_s, FIRST_CONTACT_S)
            delay_s = random.uniform(0, min(config.max_delay_s, config.first_delay_s * 2.0 ** min(tries - 1, 60)))
            if not failure.transient:
                delay_s = min(config.max_delay_s, config.first_delay_s * 4.0**doubted)
            out_of_time = time.monotonic() - started + delay_s > deadline_s
            if out_of_time or self._closing.wait(delay_s):
                raise self._give_up(failure, tries, started, deadline_s) from failure
            self._warn(failure, tries, started, deadline_s)
            with self._lock:
                self._retries += 1

    def _is_doubtful(self, exc: StorageError, is_indexed: bool) -> bool:
        """Return whether this answer contradicts an earlier one of the store."""
        return (self._granted and isinstance(exc, AccessDeniedError)) or (is_indexed and isinstance(exc, NotFoundError))

    def _note_failure(self, exc: StorageError) -> None:
        if not isinstance(exc, (StoreUnreachableError, StoreTimeoutError)):
            self._reached = True
        is_slow = isinstance(exc, StoreTimeoutError) and self._timeout.note_timeout()
        if isinstance(exc, ThrottledError) or is_slow:
            self.limiter.note_throttled()
        if isinstance(exc, ThrottledError):
            with self._lock:
                self._throttled += 1

    def _ask(self, ask: Callable[[Store], T], limit: TimeLimit, hedge_bytes: int | None) -> T:
        """Send one request, whose place in the limiter the caller holds, and perhaps a second one."""
        try:
            store = self._inner if self._timed is None else self._timed.within(limit)
        except BaseException:
            self.limiter.release()
            raise
        with self._lock:
            self._requests += 1
        is_raced = hedge_bytes is not None and self._config.hedge_share > 0
        p95_s = self._latencies.p95_s(hedge_bytes) if hedge_bytes is not None else None
        if hedge_bytes is not None and is_raced and (p95_s is None or p95_s >= WORTH_HEDGING_S):
            late_s = max(self._latencies.late_s(hedge_bytes, limit.total_s / 4), self._config.hedge_floor_s)
            result, took_s = self._race(lambda: ask(store), late_s, limit)
        else:
            result, took_s = self._ask_here(lambda: ask(store))
        if hedge_bytes is not None:
            self._latencies.add(hedge_bytes, took_s)
        self._reached = self._granted = True
        self._timeout.note_success(took_s, limit)
        self.limiter.note_success(took_s)
        return result

    def _ask_here(self, call: Callable[[], T]) -> tuple[T, float]:
        """The response, waited for by the calling thread, and the time that it took."""
        started = time.monotonic()
        try:
            return call(), time.monotonic() - started
        finally:
            self.limiter.release()

    def _race(self, call: Callable[[], T], late_s: float, limit: TimeLimit) -> tuple[T, float]:
        """The first response and the time that it took by itself."""
        race = Race(self._submit, call)
        try:
            race.start(self.limiter.release)
        except StorageError:
            self.limiter.release()
            raise
        except RuntimeError:  # the machine gives no more threads: this one asks
            return self._ask_here(call)
        if not race.wait(late_s):
            if self._may_hedge():
                try:
                    race.start(self.limiter.release)
                except (StorageError, RuntimeError):  # closed meanwhile, or no thread: the first request still finishes
                    self.limiter.release()
            if not race.wait(limit.total_s + GRACE_S):
                raise StoreTimeoutError(f"{self.url}: no response within {limit.total_s:g} s")
        if race.winner == 1:
            with self._lock:
                self._budget.won += 1
        return race.outcome(), race.winner_s

    def _submit(self, job: Callable[[], None]) -> None:
        try:
            self._pool.submit(job)
        except PoolClosedError as exc:
            raise StorageError(f"{self.url} is closed; open the store again") from exc

    def _may_hedge(self) -> bool:
        """Take a place for a second request if the budget allows one and the host has a free place."""
        throttled = self.limiter.limit < self._config.max_running
        with self._lock:
            if not self._budget.allows(self._requests, throttled=throttled) or not self.limiter.acquire(0):
                return False
            self._budget.sent += 1
            return True

    def _warn(self, failure: StorageError, tries: int, started: float, deadline_s: float) -> None:
        """Say that a call takes long; one call speaks for all that wait now."""
        now = time.monotonic()
        with self._lock:
            if now - started < self._config.warn_after_s or now - self._warned_at < WARN_EVERY_S:
                return
            self._warned_at = now
        _LOG.warning(
            "a request has failed for %.0f s (tries: %d) and is retried for up to %.0f s: %s",
            now - started, tries, deadline_s, failure,
        )  # fmt: skip

    def _give_up(self, failure: StorageError | None, tries: int, started: float, deadline_s: float) -> StorageError:
        took = f"tried {tries} times in {time.monotonic() - started:.1f} s"
        if self._closing.is_set():
            return StorageError(f"{self.url} was closed while a request waited; {took}")
        if failure is None:
            return StoreUnavailableError(
                f"{self.url}: no place for another request within {deadline_s:g} s; {took}; "
                f"{self.limiter.running} requests of this process run, {self.limiter.limit} may; other processes of "
                "this machine count too (PENSTOCK_NODE_REQUESTS)"
            )
        if isinstance(failure, StoreUnreachableError) and not self._reached:
            return _copy(failure, f"{took}, and it never responded before; check the URL, the endpoint and the network")
        return _copy(failure, f"{took}, the deadline is {deadline_s:g} s")


def _copy(failure: StorageError, more: str) -> StorageError:
    error = type(failure)(f"{failure}; {more}")
    error.transient = failure.transient
    return error


def _rebuild(inner: Store, config: RetryConfig, host: str) -> RetryStore:
    return RetryStore(inner, config, host=host)
