"""The number of rows worth handing to a thread: a part of a batch that is too short costs more than it saves."""

from __future__ import annotations

import math

# The overhead of a part is about a tenth: a thread's future and turns of the GIL, or a process's two messages.
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
        """Note the time that rows took on one of some threads, or processes."""
        took = (wall_s if wall_s > _WAITS * threads * cpu_s else cpu_s) / rows
        known = self.row_s
        self.row_s = took if known is None else known + _SMOOTHING * (took - known)

    def part_rows(self, count: int, parts: int, least_s: float) -> int:
        """Choose the rows of each part of ``count``, for ``parts`` that work at once: two for each."""
        even = -(-count // (2 * parts))
        if not self.row_s:
            return max(1, even)
        return max(1, even, math.ceil(min(count, least_s / self.row_s)))
