"""Places for requests to one host, which all processes of a user on this machine share.

A place is a byte of an empty file under a lock of an open file description (fcntl(2), F_OFD_SETLK). The kernel gives it
back however its process ends, so nothing is cleaned up and no process has to run for the others. Beside the locks the
file holds one record: how many places there are now, which throttling halves and successes raise for all; and a mark
for each place that is taken. Marks are hints for the search: those of a killed process stay until they are tried.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import struct
import time
import weakref
import zlib
from bisect import insort
from collections.abc import Callable

from ..own_folder import OwnFolder

# Responses to requests sent before a cut say nothing about the limit after it.
COOLDOWN_S = 1.0
# A record that is older than this is ignored: the load that caused it has passed.
FRESH_S = 30.0
# The number of places grows by one after a round of successes, but not faster than this: a response takes milliseconds,
# and a host forgives in seconds.
GROW_S = 0.1
MOST_PLACES = 4096
# How many places one search tries: each is a system call, which gives other threads of Python a chance to run.
_TRIES = 8
_SHARE_FOR_S = 0.05
_WAITS_FOR_S = 0.005

# The record takes the first bytes and marks the second page; locks lie behind the end of the file.
_MARKS = 4096
_FILE_BYTES = _MARKS + MOST_PLACES
_RECORD_LOCK, _WAITING, _PLACES, _MEMBERS = 1 << 15, (1 << 15) + 1, 1 << 16, 1 << 20
_RECORD = struct.Struct("<8sddd")  # magic, limit, time of the last change, time of the last cut
_SUM = struct.Struct("<I")
_MAGIC = b"penstkb1"
_LOCK = struct.Struct("@hhqqi0q")  # struct flock: type, whence, start, length, pid
_PACKED: dict[tuple[int, int], bytes] = {}


class NodeBudget:
    """The places for one host as one process sees them. Its owner, a Limiter, calls it under a lock.

    Mutable state: the places held, the membership, whether this process is marked as waiting, and the record as
    it was last read. Where locks fail, every request has a place.
    """

    def __init__(
        self, folder: OwnFolder, name: str, max_places: int, *, wall_clock: Callable[[], float] = time.time
    ) -> None:
        """Open the file ``name`` of ``folder``, which is made if it is missing.

        Raises:
            OSError: the file can't be made or opened.
        """
        if not 1 <= max_places <= MOST_PLACES:
            raise ValueError(f"NodeBudget(max_places={max_places}): needs 1 to {MOST_PLACES}")
        self._fd = folder.open(name, os.O_RDWR | os.O_CREAT)
        weakref.finalize(self, os.close, self._fd).atexit = False
        size = os.fstat(self._fd).st_size
        if size < _FILE_BYTES:  # written, so that no page is missing on a full disk
            os.pwrite(self._fd, bytes(_FILE_BYTES - size), size)
        self._marks = mmap.mmap(self._fd, MOST_PLACES, offset=_MARKS)
        self.max_places = max_places
        self._wall_clock = wall_clock
        self._held: list[int] = []  # sorted
        self._next = self._suspect = random.randrange(max_places)
        self._member = -1
        self._is_waiting = False
        self._works = True
        self._limit = float(max_places)
        self._changed_at = self._cut_at = self._seen_cut_at = 0.0
        self._share = (float("-inf"), max_places)
        self._waits = (float("-inf"), False)
        self.refresh()
        self._seen_cut_at = self._cut_at

    @property
    def limit(self) -> int:
        """The number of requests that all processes together may run now."""
        return int(self._limit)

    @property
    def held(self) -> int:
        """The number of places that this process has."""
        return len(self._held)

    def take(self) -> bool:
        """Take a place; returns False if all are taken."""
        if not self._works:
            return True
        if self._member < 0:
            self._join()
        limit = self.limit
        place = self._next if self._next < limit else random.randrange(limit)
        for _ in range(_TRIES):
            place = self._find_unmarked(place, limit)
            if place < 0:
                break
            if self._try(place):
                return True
            place = (place + 1) % limit
        for _ in range(_TRIES // 2):  # those of killed processes
            self._suspect = (self._suspect + 1) % limit
            if self._suspect not in self._held and self._try(self._suspect):
                return True
        return not self._works

    def _find_unmarked(self, start: int, limit: int) -> int:
        found = self._marks.find(b"\0", start, limit)
        return found if found >= 0 else self._marks.find(b"\0", 0, start)

    def _try(self, place: int) -> bool:
        if not self._lock(fcntl.F_WRLCK, _PLACES + place):
            return False
        self._marks[place] = 1
        insort(self._held, place)
        self._next = place
        return True

    def give(self) -> None:
        """Give a place back, the last by number: after a cut the last ones are no longer there."""
        if self._held:
            self._next = self._held.pop()
            self._marks[self._next] = 0
            self._lock(fcntl.F_UNLCK, _PLACES + self._next)
        if not self._held and not self._is_waiting:
            self._leave()

    def is_owed(self) -> bool:
        """Return whether a place that comes free must be given back, although this process has a use for it."""
        if not self._held or self._held[-1] >= self.limit:
            return True
        return len(self._held) > self.share() and self.others_wait()

    def others_wait(self) -> bool:
        """Return whether another process waits for a place, or did so some milliseconds ago."""
        now = time.monotonic()
        if now - self._waits[0] > _WAITS_FOR_S:
            self._waits = (now, self._find_other(_WAITING, _WAITING + 1) is not None)
        return self._waits[1]

    def share(self) -> int:
        """Compute this process's part of the places, if all processes that send requests now have the same."""
        now = time.monotonic()
        if now - self._share[0] > _SHARE_FOR_S:
            self._share = (now, max(1, self.limit // self._count_members()))
        return self._share[1]

    def tell_waiting(self, *, is_waiting: bool) -> None:
        """Mark this process as waiting for a place, or no longer, for the others to see."""
        if is_waiting != self._is_waiting:
            self._is_waiting = is_waiting
            self._lock(fcntl.F_RDLCK if is_waiting else fcntl.F_UNLCK, _WAITING)
        if not is_waiting and not self._held:
            self._leave()

    def cut(self, own_limit: float) -> None:
        """Halve the number of places, unless another process did so a moment ago.

        ``own_limit``: how many requests this process may run; more places than all processes use are none.
        """

        def halve(now: float) -> None:
            if abs(now - self._cut_at) >= COOLDOWN_S:
                used = min(self._limit, own_limit * self._count_members())
                self._limit, self._changed_at, self._cut_at = max(1.0, used / 2), now, now

        self._change(halve)
        self._seen_cut_at = self._cut_at

    def grow(self) -> None:
        """Add a place, unless another process did so a moment ago; called after a round of ``limit`` successes."""

        def add(now: float) -> None:
            if abs(now - self._changed_at) >= GROW_S:
                self._limit, self._changed_at = min(float(self.max_places), self._limit + 1), now

        if self._limit < self.max_places:
            self._change(add)

    def refresh(self) -> bool:
        """Read the record; returns whether another process has cut the number of places since the last time."""
        try:
            data = os.pread(self._fd, _RECORD.size + _SUM.size, 0)
        except OSError:
            return False
        now = self._wall_clock()
        limit, changed_at, cut_at = _parse(data) or (float(self.max_places), 0.0, 0.0)
        is_fresh = abs(now - changed_at) < FRESH_S
        self._limit = min(limit, float(self.max_places)) if is_fresh else float(self.max_places)
        self._changed_at, self._cut_at = changed_at, cut_at
        is_news = cut_at != self._seen_cut_at and is_fresh
        self._seen_cut_at = cut_at
        return is_news

    def _change(self, change: Callable[[float], None]) -> None:
        """Change the record; does nothing while another process changes it."""
        if not self._lock(fcntl.F_WRLCK, _RECORD_LOCK):
            return
        try:
            self.refresh()
            change(self._wall_clock())
            body = _RECORD.pack(_MAGIC, self._limit, self._changed_at, self._cut_at)
            os.pwrite(self._fd, body + _SUM.pack(zlib.crc32(body)), 0)
        except OSError:
            self._works = False
        finally:
            self._lock(fcntl.F_UNLCK, _RECORD_LOCK)

    def _join(self) -> None:
        first = os.getpid()
        for i in range(MOST_PLACES):
            place = _MEMBERS + (first + i) % MOST_PLACES
            if self._lock(fcntl.F_WRLCK, place):
                self._member = place
                return

    def _leave(self) -> None:
        if self._member >= 0:
            self._lock(fcntl.F_UNLCK, self._member)
            self._member = -1

    def _lock(self, kind: int, place: int) -> bool:
        request = _PACKED.get((kind, place))
        if request is None:
            request = _PACKED[kind, place] = _LOCK.pack(kind, os.SEEK_SET, place, 1, 0)
        try:
            fcntl.fcntl(self._fd, fcntl.F_OFD_SETLK, request)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:  # no locks on this file system, or too many
            self._works = False
            return False
        return True

    def _count_members(self) -> int:
        """Count the processes that send requests now, or wait to."""
        return 1 + self._count_others(_MEMBERS, _MEMBERS + MOST_PLACES)

    def _count_others(self, start: int, stop: int) -> int:
        """Count the locks of one byte that others hold there."""
        count, ranges = 0, [(start, stop)]
        while ranges:
            start, stop = ranges.pop()
            found = self._find_other(start, stop) if start < stop else None
            if found is not None:
                count += 1
                ranges += [(start, found), (found + 1, stop)]
        return count

    def _find_other(self, start: int, stop: int) -> int | None:
        """Find a place in a range that another process has locked."""
        request = _LOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, stop - start, 0)
        try:
            kind, _, found, _, _ = _LOCK.unpack(fcntl.fcntl(self._fd, fcntl.F_OFD_GETLK, request))
        except OSError:
            self._works = False
            return None
        return None if kind == fcntl.F_UNLCK else max(start, found)


def _parse(data: bytes) -> tuple[float, float, float] | None:
    """Parse limit, time of the last change, and of the last cut; None for a record that is missing, torn or foreign."""
    if len(data) != _RECORD.size + _SUM.size:
        return None
    body = data[: _RECORD.size]
    magic, limit, changed_at, cut_at = _RECORD.unpack(body)
    if magic != _MAGIC or _SUM.unpack(data[_RECORD.size :])[0] != zlib.crc32(body) or not 1 <= limit <= MOST_PLACES:
        return None
    return limit, changed_at, cut_at
