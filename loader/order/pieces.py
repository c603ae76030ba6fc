"""Pieces, which the permutation of an epoch moves: whole chunks, or ranges of their rows if there are few chunks.

A permutation of chunks mixes nothing in a data set of one chunk: each lane would own the same part of it in every
epoch. Ranges of rows mix the better the smaller they are. Their price is that each rank needs every chunk all the time,
so they are for data sets that a rank holds in memory anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from .permutation import IntArray


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
