"""Hedged requests: a second request when the first is late (Dean and Barroso, "The Tail at Scale", CACM 2013)."""

from __future__ import annotations

import threading
from bisect import insort
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from .errors import StorageError

T = TypeVar("T")

WINDOW = 128
ENOUGH = 20


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


class Race(Generic[T]):
    """Runs of one request; the first to succeed wins. Mutable state: the outcome, under the condition."""

    def __init__(self, submit: Callable[[Callable[[], None]], object], run: Callable[[], T]) -> None:
        """``submit`` runs a function in another thread."""
        self._submit = submit
        self._run = run
        self._changed = threading.Condition(threading.Lock())
        self._started = 0
        self._failed = 0
        self._error: BaseException | None = None
        self._result: list[T] = []
        self.winner = -1

    def start(self, done: Callable[[], None]) -> None:
        """Start another run; ``done`` is called when it ends, whether it won or not."""
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
                    self.winner = number
                self._changed.notify()
        finally:
            done()
