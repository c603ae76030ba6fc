"""How many rows are worth a thread's while: a part of a batch that is over in no time costs more than it saves."""

from __future__ import annotations

import math

# What a part costs is about a tenth: of a thread's a future and turns of the GIL, of a process's two messages.
THREADS_LEAST_S, PROCESSES_LEAST_S = 3e-4, 2e-3
_SMOOTHING = 0.2
_WAITS = 3.0  # times as long as all threads would wait for one another: then rows wait for something else


class Pace:
    """The processor time that rows took lately, or, of rows that wait for something else than each other, all of it.

    State: seconds a row, None before the first. Threads may call any method; of two that note at once one is lost.
    """

    def __init__(self) -> None:
        self.row_s: float | None = None

    def note(self, rows: int, cpu_s: float, wall_s: float, threads: int) -> None:
        """So many rows took so long on one of so many threads, or processes."""
        took = (wall_s if wall_s > _WAITS * threads * cpu_s else cpu_s) / rows
        known = self.row_s
        self.row_s = took if known is None else known + _SMOOTHING * (took - known)

    def part_rows(self, count: int, parts: int, least_s: float) -> int:
        """How many of ``count`` rows to do at a time, where so many ``parts`` work at once: two parts for each."""
        even = -(-count // (2 * parts))
        if not self.row_s:
            return max(1, even)
        return max(1, even, math.ceil(min(count, least_s / self.row_s)))
