"""A window of a lane: which of its chunks' rows come in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .permutation import IntArray

_LOOK = 1024


@dataclass(frozen=True, slots=True)
class LaneWindow:
    """A few consecutive pieces of a lane (cut where the lane is cut), and the order of their samples.

    Covers the lane's offsets ``start`` to ``stop``. Piece i is of ``chunks[i]``, from its row ``first_rows[i]`` on;
    ``bounds`` (pieces + 1,) are the pieces' ends laid end to end; ``permutation`` is (stop - start,) or None. Where
    ``selected`` is not None, first rows are places in it, and what is there are the rows.
    """

    lane: int
    index: int
    start: int
    stop: int
    chunks: IntArray
    first_rows: IntArray
    bounds: IntArray
    permutation: np.ndarray[tuple[int, ...], np.dtype[np.uint32]] | None
    selected: IntArray | None = None

    def locate(self, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Piece, and row in the piece's chunk, of some of the lane's offsets: (n,) int64 each."""
        where: IntArray = offsets - self.start
        if self.permutation is not None:
            where = self.permutation[where].astype(np.int64)
        if len(self.chunks) == self.stop - self.start:  # pieces of one row each
            pieces, rows = where, self.first_rows[where]
        else:
            pieces = np.searchsorted(self.bounds, where, side="right") - 1
            rows = where + (self.first_rows - self.bounds[:-1])[pieces]
        return pieces, rows if self.selected is None else self.selected[rows]

    def first_uses(self, start: int) -> IntArray:
        """The offset, from ``start`` on, at which each piece is first used; -1 where it is not: (pieces,) int64.

        A shuffled window's first samples come from all of its pieces, so a look at a few of them mostly suffices.
        """
        first = np.full(len(self.chunks), -1, np.int64)
        size = _LOOK
        while start < self.stop and (first < 0).any():
            offsets = np.arange(start, min(self.stop, start + size), dtype=np.int64)
            pieces, _ = self.locate(offsets)
            found = np.full(len(first), -1, np.int64)
            found[pieces[::-1]] = offsets[::-1]  # where an index repeats, the last value stays: the first use
            first = np.where(first < 0, found, first)
            start, size = start + size, 4 * size
        return first
