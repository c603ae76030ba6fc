"""A window of a lane: its chunks' rows and their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .cached import cached_property
from .permutation import IntArray, permutation


@dataclass(frozen=True, slots=True)
class Pieces:
    """Row ranges of chunks, (pieces,) int64 each: the chunk, the first row in it, and the number of rows."""

    chunks: IntArray
    first_rows: IntArray
    samples: IntArray

    def take(self, order: IntArray) -> Pieces:
        """The same pieces in another order, (pieces,) int64."""
        samples = self.samples if self.samples.strides == (0,) else self.samples[order]
        return Pieces(self.chunks[order], self.first_rows[order], samples)


def cut_into_pieces(chunk_samples: IntArray, piece: int) -> Pieces:
    """Cut chunks of (chunks,) rows into equal ranges of at most ``piece`` rows, at least 1.

    Range i of k of a chunk of n rows is n * i // k to n * (i + 1) // k.
    """
    chunks = np.arange(len(chunk_samples), dtype=np.int64)
    counts = -(-chunk_samples // piece)
    index = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    if piece == 1:
        return Pieces(np.repeat(chunks, counts), index, np.broadcast_to(np.int64(1), index.shape))
    rows, parts = np.repeat(chunk_samples, counts), np.repeat(counts, counts)
    first_rows = rows * index // parts
    return Pieces(np.repeat(chunks, counts), first_rows, rows * (index + 1) // parts - first_rows)


_LOOK = 1024
_FEW_PIECES = 8


@dataclass(frozen=True)
class LaneWindow:
    """A few consecutive pieces of a lane (cut where the lane is cut), and the order of their samples.

    Covers the lane's offsets ``start`` to ``stop``. Piece i is of ``chunks[i]``, from its row ``first_rows[i]`` on;
    ``bounds`` (pieces + 1,) are the pieces' ends laid end to end; ``key`` is that of the permutation of all samples, or
    None. Where ``selected`` is not None, first rows are places in it, and what is there are the rows.
    """

    lane: int
    index: int
    start: int
    stop: int
    chunks: IntArray
    first_rows: IntArray
    bounds: IntArray
    key: int | None
    selected: IntArray | None = None

    @cached_property
    def permutation(self) -> np.ndarray[tuple[int, ...], np.dtype[np.uint32]] | None:
        """(stop - start,), made when it is first asked for: a sort of as many numbers."""
        return None if self.key is None else permutation(self.stop - self.start, self.key).astype(np.uint32)

    def locate(self, offsets: IntArray) -> tuple[IntArray, IntArray]:
        """Piece, and row in the piece's chunk, of some of the lane's offsets: (n,) int64 each."""
        where: IntArray = offsets - self.start
        return self._find(where if self.permutation is None else self.permutation[where])

    def locate_run(self, start: int, stop: int) -> tuple[IntArray | None, IntArray]:
        """``locate`` of the offsets from ``start`` to ``stop``; no pieces where the window has only one."""
        where = self.places(start, stop)
        if len(self.chunks) > 1:
            return self._find(where)
        rows = np.add(where, self.first_rows[0], dtype=np.int64)
        return None, rows if self.selected is None else self.selected[rows]

    def places(self, start: int, stop: int) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
        """Places in the pieces laid end to end of the offsets from ``start`` to ``stop``: (stop - start,)."""
        if self.permutation is None:
            return np.arange(start - self.start, stop - self.start, dtype=np.int64)
        return self.permutation[start - self.start : stop - self.start]

    def _find(self, places: np.ndarray[Any, Any]) -> tuple[IntArray, IntArray]:
        """Piece and row of places in the pieces laid end to end."""
        where: IntArray = places.astype(np.int64)
        if len(self.chunks) == self.stop - self.start:  # pieces of one row each
            pieces, rows = where, self.first_rows[where]
        else:
            pieces = self._pieces_at(where)
            rows = where + (self.first_rows - self.bounds[:-1])[pieces]
        return pieces, rows if self.selected is None else self.selected[rows]

    def _pieces_at(self, where: IntArray) -> IntArray:
        """Find the piece that each place is in. Among few, a comparison with each takes less than a search."""
        if len(self.chunks) > _FEW_PIECES:
            return np.searchsorted(self.bounds, where, side="right") - 1
        pieces = np.zeros(len(where), np.int64)
        for edge in self.bounds[1:-1].tolist():
            pieces += where >= edge
        return pieces

    def first_uses(self, start: int) -> IntArray:
        """The offset, from ``start`` on, at which each piece is first used; -1 where it is not: (pieces,) int64.

        A shuffled window's first samples come from all of its pieces, so a look at a few of them mostly suffices.
        """
        first = np.full(len(self.chunks), -1, np.int64)
        if len(first) == 1 and start < self.stop:
            first[0] = start  # whatever the permutation is
        size = _LOOK
        while start < self.stop and (first < 0).any():
            offsets = np.arange(start, min(self.stop, start + size), dtype=np.int64)
            pieces, _ = self.locate(offsets)
            found = np.full(len(first), -1, np.int64)
            found[pieces[::-1]] = offsets[::-1]  # where an index repeats, the last value stays: the first use
            first = np.where(first < 0, found, first)
            start, size = start + size, 4 * size
        return first


@dataclass(frozen=True, slots=True)
class Run:
    """Offsets of a lane, ``start`` to ``stop``, that lie in one window."""

    window: LaneWindow
    start: int
    stop: int


# Runs shorter than this on average, in windows of no more pieces than this, are located together: each call of numpy
# takes longer than some hundred numbers.
_SHORT, _JOINT_PIECES = 256, 32


def locate_runs(runs: Sequence[Run]) -> tuple[IntArray, IntArray]:
    """Chunk and row of runs laid end to end: (n,) int64 each."""
    lengths = [run.stop - run.start for run in runs]
    windows = [run.window for run in runs]
    counts = [len(window.chunks) for window in windows]
    if sum(lengths) > _SHORT * len(runs) or max(counts) > _JOINT_PIECES or windows[0].selected is not None:
        found = [run.window.locate_run(run.start, run.stop) for run in runs]
        chunks = [
            np.full(length, window.chunks[0]) if pieces is None else window.chunks[pieces]
            for (pieces, _), window, length in zip(found, windows, lengths, strict=True)
        ]
        return np.concatenate(chunks), np.concatenate([rows for _, rows in found])
    # As if the windows lay end to end, one for each run.
    sizes = np.array([window.stop - window.start for window in windows], np.int64)
    bases = np.cumsum(sizes) - sizes
    begins = np.concatenate([window.bounds[:-1] for window in windows]) + np.repeat(bases, counts)
    places = np.concatenate([run.window.places(run.start, run.stop) for run in runs]) + np.repeat(bases, lengths)
    pieces = begins.searchsorted(places, side="right") - 1
    shifts = np.concatenate([window.first_rows for window in windows]) - begins
    return np.concatenate([window.chunks for window in windows])[pieces], places + shifts[pieces]
