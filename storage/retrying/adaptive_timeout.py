"""Timeout of one try of a request: its size over a throughput floor, longer while a whole host is slow."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..store import Store

# Time-outs with no success between them: one bad response is a matter of its own, a row of them is a slow host.
ROW = 4
MAX_FACTOR = 16
# What is assumed of an object whose size is not known.
GUESSED_BYTES = 16 << 20


@dataclass(frozen=True, slots=True)
class TimeLimit:
    """``total_s`` for a whole response, ``idle_s`` without a byte of it."""

    total_s: float
    idle_s: float


@runtime_checkable
class TimedStore(Store, Protocol):
    """A store whose requests can be given a time limit."""

    def within(self, limit: TimeLimit) -> Store:
        """The same store with requests that raise StoreTimeoutError past ``limit``; closed with this one."""
        ...


class AdaptiveTimeout:
    """Time limits of one store. Mutable state: the factor, and time-outs since the last success, under a lock.

    Limits lie on a grid (1.5 times the idle time, doubled again and again), so that few of them exist. They double with
    each try of a request. When every request times out, as on a slow link, they double for all that follow, until
    responses come well within them again.
    """

    def __init__(self, idle_s: float, min_bytes_per_s: float) -> None:
        self._idle_s = idle_s
        self._min_bytes_per_s = min_bytes_per_s
        self._lock = threading.Lock()
        self._factor = 1
        self._row = 0

    def limit(self, size_bytes: int | None, tries: int, left_s: float) -> TimeLimit:
        """The limit of try number ``tries`` (from 1), within ``left_s`` where the shortest one fits into that."""
        size = GUESSED_BYTES if size_bytes is None else size_bytes
        shortest = 1.5 * self._idle_s
        base = shortest
        while base < self._idle_s + size / self._min_bytes_per_s:
            base *= 2
        factor = max(self._factor, 1 << min(tries - 1, 8))
        while factor > 1 and base * factor > left_s:
            factor //= 2
        return TimeLimit(base * factor, self._idle_s * factor)

    def deadline_s(self, deadline_s: float, size_bytes: int | None) -> float:
        """The deadline of a call; for a size that takes long at the floor, three times as long as that."""
        return max(deadline_s, 3 * (size_bytes or 0) / self._min_bytes_per_s)

    def note_timeout(self) -> bool:
        """Record a time-out; returns whether the host itself seems slow."""
        with self._lock:
            self._row += 1
            if self._row < ROW:
                return False
            self._row = 0
            self._factor = min(MAX_FACTOR, self._factor * 2)
            return True

    def note_success(self, took_s: float, limit: TimeLimit) -> None:
        """Record a whole response, which took so much of its limit."""
        if self._row == 0 and self._factor == 1:
            return
        with self._lock:
            self._row = 0
            if took_s * 4 < limit.total_s:
                self._factor = max(1, self._factor // 2)
