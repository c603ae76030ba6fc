"""Hedged requests: a second request when the first is late (Dean and Barroso, "The Tail at Scale", CACM 2013)."""

from __future__ import annotations

import threading
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from ..errors import StorageError
from ..threads.interruptible import Condition

T = TypeVar("T")

WINDOW = 128
ENOUGH = 20
FEW = 4
LATE = 3
# Second requests that are allowed before any share of the requests so far is worth one.
FIRST_HEDGES = 4
# Second requests never exceed this share of all, whatever they win.
MOST_HEDGES = 0.25


class LatencyBook:
    """Recent latencies by response size, and their 95th percentile. Mutable state: the windows, under a lock."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._windows: dict[int, deque[float]] = {}
        self._sorted: dict[int, list[float]] = {}

    def add(self, size_bytes: int, seconds: float) -> None:
        """Record one response; sizes within a factor of two share a window."""
        size_class = size_bytes.bit_length()
        with self._lock:
            window = self._windows.setdefault(size_class, deque())
            ordered = self._sorted.setdefault(size_class, [])
            if len(window) == WINDOW:
                ordered.remove(window.popleft())
            window.append(seconds)
            insort(ordered, seconds)

    def p95_s(self, size_bytes: int) -> float | None:
        """The 95th percentile for responses of about this size; None until enough were recorded."""
        with self._lock:
            ordered = self._sorted.get(size_bytes.bit_length())
            return ordered[len(ordered) * 95 // 100] if ordered and len(ordered) >= ENOUGH else None

    def late_s(self, size_bytes: int, blind_s: float) -> float:
        """Latency at which a response of about this size gets a second request.

        Three times the 95th percentile: one response in twenty is later than that percentile by definition, and healthy
        ones are no reason to ask again. With few latencies known, four times the longest; with fewer, ``blind_s``.
        """
        p95_s = self.p95_s(size_bytes)
        if p95_s is not None:
            return min(blind_s, LATE * p95_s)
        with self._lock:
            ordered = self._sorted.get(size_bytes.bit_length(), [])
            return min(blind_s, 4 * ordered[-1]) if len(ordered) >= FEW else blind_s


class HedgeBudget:
    """Budget of second requests. Mutable state: three counts; the caller holds a lock.

    A second request that wins returns its place, unless the host throttles: then load is what makes it slow, and
    second requests add load.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self.sent = 0
        self.won = 0

    def allows(self, requests: int, *, throttled: bool) -> bool:
        """Return whether one more may be sent after ``requests`` requests."""
        if self._share == 0:
            return False
        spent = self.sent if throttled else self.sent - self.won
        most = max(self._share, MOST_HEDGES) * requests
        return spent + 1 <= FIRST_HEDGES + requests * self._share and self.sent + 1 <= FIRST_HEDGES + most


class Race(Generic[T]):
    """Runs of one request; the first to succeed wins. Mutable state: the outcome, under the condition."""

    def __init__(self, submit: Callable[[Callable[[], None]], object], run: Callable[[], T]) -> None:
        """``submit`` runs a function in another thread."""
        self._submit = submit
        self._run = run
        self._changed = Condition()
        self._started = 0
        self._failed = 0
        self._error: BaseException | None = None
        self._result: list[T] = []
        self.winner = -1
        self.winner_s = 0.0

    def start(self, done: Callable[[], None]) -> None:
        """Start another run; ``done`` is called when it ends, whether it won or not.

        ``winner`` is the number of the run that won, ``winner_s`` the time that it took by itself.
        """
        number = self._started
        self._submit(lambda: self._compete(number, done))
        with self._changed:
            self._started += 1

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until there is an outcome; returns False if there is none within ``timeout_s``."""
        with self._changed:
            return self._changed.wait_for(self._is_over, timeout_s)

    def outcome(self) -> T:
        """The first result, or the error that ended the race."""
        if self._result:
            return self._result[0]
        assert self._error is not None
        raise self._error

    def _is_over(self) -> bool:
        lasting = isinstance(self._error, StorageError) and not self._error.transient
        return bool(self._result) or lasting or 0 < self._failed == self._started

    def _compete(self, number: int, done: Callable[[], None]) -> None:
        started = time.monotonic()
        try:
            result = self._run()
        except BaseException as exc:  # noqa: BLE001 - handed to the caller, who raises it
            with self._changed:
                self._failed += 1
                self._error = exc
                self._changed.notify()
        else:
            with self._changed:
                if not self._result:
                    self._result.append(result)
                    self.winner, self.winner_s = number, time.monotonic() - started
                self._changed.notify()
        finally:
            done()
