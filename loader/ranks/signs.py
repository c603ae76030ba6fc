"""Heartbeats: each rank counts up a key of the store, and polls whether the next rank that takes part still counts.

So the silence of any rank, also of all ranks of a host that is cut off, is seen by one of those that are left, at two
small requests a rank every few seconds.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from typing import Any

from ...storage.store_link import SILENT_S
from ..dataset.exchange import RemoteError

SIGN_S = 5.0
_LOOKED_PAST = 16  # ranks that have not come yet, or have left, which one poll passes over
_NAMESPACE = "penstock/alive"
_LEFT = "left"
_LATE = 4.0  # polls that come this many times later than they should: this process was suspended


@dataclass(frozen=True, slots=True)
class Seen:
    """The newest heartbeat of a rank, and when it was first seen, by the reader's clock."""

    rank: int
    sign: str
    since_s: float


def look_on(before: Seen | None, rank: int, sign: str, now_s: float, looked_at_s: float) -> Seen:
    """Update what is known of a rank after a poll; a late poll begins anew, as the reader itself was suspended."""
    is_late = now_s - looked_at_s > _LATE * SIGN_S
    if before is None or is_late or (before.rank, before.sign) != (rank, sign):
        return Seen(rank, sign, now_s)
    return before


def judge(seen: Seen, now_s: float) -> RemoteError | None:
    """The silence of a rank as the error that stops the others; None while it may be alive."""
    if now_s - seen.since_s <= SILENT_S:
        return None
    host = seen.sign.partition(" ")[2]
    return RemoteError(
        seen.rank,
        "Silence",
        f"it has shown no sign of life for {now_s - seen.since_s:.0f} s: its process is dead or stopped, or its host, "
        f"{host}, is down or cut off; start again without that host, and the order goes on on the ranks that are left",
    )


class Signs:
    """Heartbeats that one rank sends and reads. Used by one thread. Mutable state: the own count, and what was seen."""

    def __init__(self, rank: int, world_size: int, now_s: float) -> None:
        self._rank = rank
        self._world_size = world_size
        self._count = 0
        self._seen: Seen | None = None
        self._looked_at_s = now_s
        self._due_s = now_s

    def exchange(self, store: Any, now_s: float) -> RemoteError | None:
        """Send a heartbeat and poll the next rank's, if they are due; returns an error if that rank is silent.

        Raises:
            RuntimeError: the store is gone.
        """
        if now_s < self._due_s:
            return None
        self._due_s = now_s + SIGN_S
        self._count += 1
        store.set(_key(self._rank), f"{self._count} {socket.gethostname()}")
        found = self._find_next(store)
        before, looked_at_s, self._looked_at_s = self._seen, self._looked_at_s, now_s
        self._seen = None if found is None else look_on(before, *found, now_s, looked_at_s)
        return None if self._seen is None else judge(self._seen, now_s)

    def leave(self, store: Any) -> None:
        """Announce that this rank sends no more heartbeats, and is not missed."""
        store.set(_key(self._rank), _LEFT)

    def _find_next(self, store: Any) -> tuple[int, str] | None:
        for step in range(1, min(self._world_size, _LOOKED_PAST + 1)):
            rank = (self._rank + step) % self._world_size
            if store.check([_key(rank)]) and (sign := store.get(_key(rank)).decode()) != _LEFT:
                return rank, sign
        return None


def _key(rank: int) -> str:
    return f"{_NAMESPACE}/{rank}"
