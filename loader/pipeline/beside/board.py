"""A page of shared memory in each direction: what the loader's process has done, and what the loop waits for.

Reading asks nothing of the other process, so metrics can be had at any time, from any thread, and after its death.
"""

from __future__ import annotations

import mmap
import os
import pickle
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ....storage.observability.counts import StoreCounts

_WAITS = struct.Struct("<dd")  # seconds waited so far, and since when it waits now; 0 where it does not
_HEAD = struct.Struct("<QII")  # the number of a report, and the size and checksum of what follows
_STARTS = (64, 32 << 10)  # two places in turns: while one is being written, the other holds the report before
_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The state of the loader's process: sums since it began, levels now, and what the next batch waits for.

    ``sent`` counts the deliveries of pipeline number ``generation``. ``estimates`` are of the outputs of sources' first
    epochs, where only reading tells.
    """

    generation: int = 0
    sent: int = 0
    totals: Mapping[str, Any] = field(default_factory=dict)
    estimates: Mapping[int, float] = field(default_factory=dict)
    store: StoreCounts = field(default_factory=StoreCounts)
    levels: Mapping[str, Any] = field(default_factory=dict)
    activity: Mapping[str, Any] = field(default_factory=dict)


class Board:
    """The shared page. One process writes reports and the other waits; one thread at a time writes each."""

    def __init__(self, descriptor: int | None = None) -> None:
        """Map the page of ``descriptor``, which is closed with it; without one, make a new page."""
        is_new = descriptor is None
        self.descriptor = os.memfd_create("penstock-board") if descriptor is None else descriptor
        if is_new:
            os.ftruncate(self.descriptor, _BYTES)
        self._page = mmap.mmap(self.descriptor, _BYTES)
        self._number = 0
        self._last = Report()

    def write(self, report: Report) -> None:
        """Replace the report."""
        data = pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
        if _STARTS[0] + _HEAD.size + len(data) > _STARTS[1]:
            return
        self._number += 1
        head = _STARTS[self._number % 2]
        start = head + _HEAD.size
        self._page[start : start + len(data)] = data
        _HEAD.pack_into(self._page, head, self._number, len(data), zlib.crc32(data))

    def read(self) -> Report:
        """Read the newest whole report."""
        newest = self._number
        for head in _STARTS:
            number, size, checksum = _HEAD.unpack_from(self._page, head)
            start = head + _HEAD.size
            # Without a size it is the head of a place's first report, of which only the number has been written.
            if number > newest and size and zlib.crc32(data := self._page[start : start + size]) == checksum:
                newest, self._last = number, pickle.loads(data)
        self._number = newest
        return self._last

    def write_waits(self, waited_s: float, since: float | None) -> None:
        """Tell how long the loop has waited so far, and since when (``time.perf_counter()``) it waits, if it does."""
        _WAITS.pack_into(self._page, 0, waited_s, since or 0.0)

    def read_waits(self, now: float) -> float:
        """Read how long the loop has waited so far, until ``now``."""
        waited_s, since = _WAITS.unpack_from(self._page, 0)
        return float(waited_s + (now - since if since else 0.0))

    def close(self) -> None:
        os.close(self.descriptor)
        self._page.close()
