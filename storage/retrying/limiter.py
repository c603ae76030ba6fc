"""Limits on concurrent requests: one per host for the threads of a process, and one for all processes of a node.

Additive increase, multiplicative decrease (Chiu and Jain, 1989), as in TCP: a round of successes adds one, a throttled
request halves.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from ..errors import AccessDeniedError, StorageError
from ..own_folder import OwnFolder
from ..threads.interruptible import Condition
from .node_budget import COOLDOWN_S, MOST_PLACES, NodeBudget

NODE_REQUESTS = 256
POLL_S = 0.25
# How often a place of the node's is looked for: more often by a process that has less than its share.
SEARCH_S = (0.004, 0.02)
# So many places are kept from one request to the next, while others of the process run and no process waits: that saves
# two system calls a request.
KEPT = 2
# A process that has waited this long for its only request sends it without a place: whatever holds the places, a
# stopped process perhaps, slows the others down but does not stop them.
PATIENCE_S = 5.0

_SWITCH = "PENSTOCK_NODE_REQUESTS"
_LOG = logging.getLogger(__name__)


class Limiter:
    """A semaphore whose limit follows what the host can handle.

    Mutable state, all under one condition: the limit, the numbers of running and waiting requests, successes since the
    last raises, the time of the last cut, and the node's budget. Of the waiting threads one looks for a place of the
    node's; a place that comes free goes to another thread here, unless the process owes it to others.
    """

    def __init__(
        self,
        max_running: int,
        *,
        open_budget: Callable[[], NodeBudget | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``open_budget`` is called again in a forked child, whose places are not its parent's."""
        if max_running < 1:
            raise ValueError(f"Limiter(max_running={max_running}): needs 1 or more")
        self._max = max_running
        self._limit = float(max_running)
        self._clock = clock
        self._open_budget = open_budget
        self.round_trip_s: float | None = None  # of the fastest response so far, with the server's own time
        self._reset()

    def _reset(self) -> None:
        self._changed = Condition()
        self._running = self._waiting = self._successes = self._node_successes = 0
        self._spare = 0  # places of the node's that wait for a thread of this process
        self._without_place = 0
        self._is_searching = False
        self._cut_at = -COOLDOWN_S
        self._polled_at = self._clock()
        self._budget = self._open_budget()

    @property
    def limit(self) -> int:
        """The number of requests that may run at once now in this process."""
        return int(self._limit)

    @property
    def running(self) -> int:
        """The number of requests that run now."""
        return self._running

    def acquire(self, timeout_s: float) -> bool:
        """Wait for a place; returns False if there is none within ``timeout_s``."""
        with self._changed:
            self._poll()
            return self._enter(0.0) or (timeout_s > 0 and self._wait(timeout_s))

    def release(self) -> None:
        """Give a place back."""
        with self._changed:
            self._running -= 1
            if self._without_place:
                self._without_place -= 1
            elif self._budget is not None:
                self._spare += 1
                self._give_spare(self._budget)
            self._changed.notify()

    def note_success(self, took_s: float | None = None) -> None:
        """Record a success: after a full round of them the limit grows by one, here and for the node."""
        if took_s is not None:
            self.round_trip_s = min(took_s, self.round_trip_s or took_s)
        budget = self._budget
        if self._limit >= self._max and (budget is None or budget.limit >= budget.max_places):
            return
        with self._changed:
            self._successes += 1
            if self._successes >= self._limit:
                self._successes = 0
                self._limit = min(float(self._max), self._limit + 1)
                self._changed.notify()
            self._node_successes += 1
            if self._budget is not None and self._node_successes >= self._budget.limit:
                self._node_successes = 0
                self._budget.grow()

    def note_throttled(self) -> None:
        """Halve the limit here, the node's, and those of its other processes: the host asked for fewer requests."""
        with self._changed:
            limit = self._limit
            if self._cut() and self._budget is not None:
                self._budget.cut(limit)

    def reduce_max(self, max_running: int) -> None:
        """Allow no more than ``max_running`` from now on."""
        with self._changed:
            self._max = min(self._max, max_running)
            self._limit = min(self._limit, float(self._max))

    def _enter(self, waited_s: float) -> bool:
        if self._running >= int(self._limit):
            return False
        if self._budget is not None:
            if self._spare:
                self._spare -= 1
            elif not self._budget.take():
                if self._running or waited_s < PATIENCE_S:
                    return False
                self._without_place += 1
        self._running += 1
        return True

    def _wait(self, timeout_s: float) -> bool:
        started = time.monotonic()
        self._waiting += 1
        try:
            while (waited_s := time.monotonic() - started) < timeout_s:
                left_s = timeout_s - waited_s
                if self._is_searching or self._budget is None or self._running >= int(self._limit):
                    self._changed.wait(left_s)
                else:
                    self._search(self._budget, left_s)
                self._poll()
                if self._enter(time.monotonic() - started):
                    return True
            return False
        finally:
            self._waiting -= 1
            self._hand_on()

    def _search(self, budget: NodeBudget, left_s: float) -> None:
        self._is_searching = True
        try:
            budget.tell_waiting(is_waiting=True)
            self._changed.wait(min(left_s, SEARCH_S[budget.held >= budget.share()]))
        finally:
            self._is_searching = False

    def _hand_on(self) -> None:
        """Pass the search on after a thread stops waiting: to another, or the rest to the node's other processes."""
        if self._waiting:
            self._changed.notify()
        elif self._budget is not None:
            self._budget.tell_waiting(is_waiting=False)
            self._give_spare(self._budget)

    def _give_spare(self, budget: NodeBudget) -> None:
        """Give back the node's places that no thread here waits for, and those that are owed to other processes."""
        useful = min(self._waiting, int(self._limit) - self._running)
        if self._waiting == 0 and self._running and not budget.others_wait():
            useful = KEPT
        while self._spare and (self._spare > useful or budget.is_owed()):
            self._spare -= 1
            budget.give()

    def _cut(self) -> bool:
        now = self._clock()
        if now - self._cut_at < COOLDOWN_S:
            return False
        self._cut_at, self._successes = now, 0
        self._limit = max(1.0, self._limit / 2)
        return True

    def _poll(self) -> None:
        """Look at the node's record, but rarely: it is a system call."""
        now = self._clock()
        if self._budget is None or now - self._polled_at < POLL_S:
            return
        self._polled_at = now
        if self._budget.refresh():
            self._cut()


_LIMITERS: dict[str, Limiter] = {}
_LIMITERS_LOCK = threading.Lock()


def limiter_of(host: str, max_running: int) -> Limiter:
    """The limiter of this process for a host; the smallest ``max_running`` requested so far applies.

    Raises:
        StorageError: PENSTOCK_NODE_REQUESTS is no number from 0 to 4096.
    """
    with _LIMITERS_LOCK:
        limiter = _LIMITERS.get(host)
        if limiter is None:
            places = _node_requests()
            limiter = _LIMITERS[host] = Limiter(max_running, open_budget=lambda: open_budget(host, places))
        else:
            limiter.reduce_max(max_running)
        return limiter


def open_budget(host: str, max_places: int) -> NodeBudget | None:
    """This user's budget for a host, in a folder that is this user's alone; None where there is no such folder."""
    if max_places == 0:
        return None
    folder = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"penstock-{os.geteuid()}"
    name = "requests-" + hashlib.blake2b(host.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
    try:
        return NodeBudget(OwnFolder(folder, what="folder", cure="set XDG_RUNTIME_DIR"), name, max_places)
    except (OSError, AccessDeniedError) as exc:
        _warn_once(f"requests to a host are limited per process, not for the whole machine: {exc}")
        return None


def _node_requests() -> int:
    text = os.environ.get(_SWITCH, "") or str(NODE_REQUESTS)
    if not text.isascii() or not text.isdecimal() or int(text) > MOST_PLACES:
        raise StorageError(
            f"{_SWITCH}={text!r}: write how many requests to one host all processes of this machine may run at a time, "
            f"1 to {MOST_PLACES}, or 0 to have each process count for itself"
        )
    return int(text)


_WARNED: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _WARNED:
        _WARNED.add(text)
        _LOG.warning("%s", text)


def _restart_in_child() -> None:
    """After a fork no request runs in the child, and locks held by other threads would never be released."""
    global _LIMITERS_LOCK
    _LIMITERS_LOCK = threading.Lock()
    for limiter in _LIMITERS.values():
        limiter._reset()


os.register_at_fork(after_in_child=_restart_in_child)
