"""How many requests may run at once: one limit per host for all threads of a process, cut node-wide on throttling.

Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP: a round of successes adds one, a throttled
request halves. The processes of a node signal each other through the timestamp of an empty file: there is nothing to
lock or to clean up.
"""

from __future__ import annotations

import hashlib
import os
import stat
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# Responses to requests sent before a cut say nothing about the limit after it.
COOLDOWN_S = 1.0
POLL_S = 0.25
# A mark older than this is ignored: the load that caused it has passed.
FRESH_S = 30.0


class Limiter:
    """A semaphore whose limit follows what the host can handle.

    Mutable state, all under one condition: the limit, the number of running requests, successes since the last raise,
    the time of the last cut, and the newest timestamp seen on the node's mark.
    """

    def __init__(
        self, max_running: int, *, mark: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        if max_running < 1:
            raise ValueError(f"Limiter(max_running={max_running}): needs 1 or more")
        self._max = max_running
        self._limit = float(max_running)
        self._clock = clock
        self._mark = mark
        self._reset()

    def _reset(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._running = 0
        self._successes = 0
        self._cut_at = -COOLDOWN_S
        self._polled_at = self._clock()
        self._seen_mark = self._read_mark()

    @property
    def limit(self) -> int:
        """The number of requests that may run at once now."""
        return int(self._limit)

    @property
    def running(self) -> int:
        """The number of requests that run now."""
        return self._running

    def acquire(self, timeout_s: float) -> bool:
        """Wait for a place; returns False if there is none within ``timeout_s``."""
        with self._changed:
            self._poll()
            if self._running < int(self._limit):
                self._running += 1
                return True
            if timeout_s <= 0 or not self._changed.wait_for(lambda: self._running < int(self._limit), timeout_s):
                return False
            self._running += 1
            return True

    def release(self) -> None:
        """Give a place back."""
        with self._changed:
            self._running -= 1
            self._changed.notify()

    def note_success(self) -> None:
        """Record a success: after a full round of them the limit grows by one."""
        if self._limit >= self._max:
            return
        with self._changed:
            self._successes += 1
            if self._successes >= self._limit:
                self._successes = 0
                self._limit = min(float(self._max), self._limit + 1)
                self._changed.notify()

    def note_throttled(self) -> None:
        """Halve the limit here and in the node's other processes, because the host asked for fewer requests."""
        with self._changed:
            if self._cut():
                self._write_mark()

    def _cut(self) -> bool:
        now = self._clock()
        if now - self._cut_at < COOLDOWN_S:
            return False
        self._cut_at, self._successes = now, 0
        self._limit = max(1.0, self._limit / 2)
        return True

    def _poll(self) -> None:
        """Look at the node's mark, but rarely: it is a system call."""
        now = self._clock()
        if self._mark is None or now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        newest = self._read_mark()
        if newest > self._seen_mark:
            self._seen_mark = newest
            if time.time() - newest < FRESH_S:
                self._cut()

    def _read_mark(self) -> float:
        if self._mark is None:
            return 0.0
        try:
            return self._mark.stat().st_mtime
        except OSError:
            return 0.0

    def _write_mark(self) -> None:
        if self._mark is not None:
            with suppress(OSError):  # without the mark each process is throttled on its own
                self._mark.touch(mode=0o600)
                self._seen_mark = self._read_mark()


_LIMITERS: dict[str, Limiter] = {}
_LIMITERS_LOCK = threading.Lock()


def limiter_of(host: str, max_running: int) -> Limiter:
    """The limiter of this process for a host; the smallest ``max_running`` requested so far applies."""
    with _LIMITERS_LOCK:
        limiter = _LIMITERS.get(host)
        if limiter is None:
            limiter = _LIMITERS[host] = Limiter(max_running, mark=_mark_path(host))
        elif max_running < limiter._max:
            with limiter._changed:
                limiter._max = max_running
                limiter._limit = min(limiter._limit, float(max_running))
        return limiter


def _mark_path(host: str) -> Path | None:
    """A file in a folder that only this user can write; None if there is no such folder."""
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
    except OSError:
        return None
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return None
    return folder / ("throttled-" + hashlib.blake2b(host.encode(), digest_size=8).hexdigest())


def _restart_in_child() -> None:
    """After a fork no request runs in the child, and locks held by other threads would never be released."""
    global _LIMITERS_LOCK
    _LIMITERS_LOCK = threading.Lock()
    for limiter in _LIMITERS.values():
        limiter._reset()


os.register_at_fork(after_in_child=_restart_in_child)
