"""Queue of fetched chunks that wait to be opened, by as many threads at a time as there are cores.

So fetching never waits for opening: the wanted number of requests stays in flight.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .chunk_source import Fetched


class OpeningQueue:
    """Queue in the order in which the bytes came. It has no lock: callers hold the reader's."""

    def __init__(self, at_once: int) -> None:
        """Let ``at_once`` threads open chunks at a time."""
        self._at_once = at_once
        self._opening = 0
        self._waiting: deque[tuple[int, Fetched | None]] = deque()

    def put(self, chunk: int, fetched: Fetched | None) -> None:
        self._waiting.append((chunk, fetched))

    @property
    def has_one(self) -> bool:
        """True if there is a chunk to open and a thread may open it."""
        return bool(self._waiting) and self._opening < self._at_once

    def __len__(self) -> int:
        """Number of chunks that wait."""
        return len(self._waiting)

    def take(self) -> tuple[int, Fetched | None]:
        """The chunk that came first; ``end`` follows."""
        self._opening += 1
        return self._waiting.popleft()

    def end(self) -> None:
        """Record that a chunk that was taken is open, or cannot be opened."""
        self._opening -= 1

    def clear(self) -> None:
        """Open nothing more."""
        self._waiting.clear()
