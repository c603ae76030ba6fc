"""A window of a lane: which of its chunks' rows come in which order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .permutation import IntArray


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
