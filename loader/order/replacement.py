"""Choose samples to replace a bad one: a function of (seed, epoch, sample id) alone, so the same on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from .permutation import IntArray, permutation, random_numbers, stream_key

if TYPE_CHECKING:
    from .selecting.selection import Selection

_FOR_NEAR, _FOR_FAR, _FOR_ROWS = 7, 8, 9  # what a stream of random numbers is used for, as in plan.py
NEAR = 8  # are tried in the bad sample's own chunk
FAR = 8  # are tried in other chunks, one in each


def candidates(
    seed: int, epoch: int, sample_id: int, first_ids: IntArray, samples: IntArray, selection: Selection | None = None
) -> Iterator[tuple[int, int]]:
    """The chunk and row of the samples to try, in order: up to 8 of the same chunk, then one each of up to 8 others.

    ``first_ids`` and ``samples`` (chunks,) int64 are those of the manifest. Samples are of the same selection.
    """
    words = seed, epoch, sample_id
    own = int(np.searchsorted(first_ids, sample_id, side="right")) - 1
    rows = _rows_of(own, samples, selection)
    rows = rows[rows != sample_id - int(first_ids[own])]
    for place in permutation(len(rows), stream_key(_FOR_NEAR, *words))[:NEAR].tolist():
        yield own, int(rows[place])
    chunks = np.flatnonzero(samples if selection is None else selection.counts)
    chunks = chunks[chunks != own]
    draws = random_numbers(0, FAR, stream_key(_FOR_ROWS, *words)).tolist()
    for place, draw in zip(permutation(len(chunks), stream_key(_FOR_FAR, *words)).tolist(), draws, strict=False):
        chunk = int(chunks[place])
        rows = _rows_of(chunk, samples, selection)
        yield chunk, int(rows[draw % len(rows)])


def _rows_of(chunk: int, samples: IntArray, selection: Selection | None) -> IntArray:
    return np.arange(int(samples[chunk]), dtype=np.int64) if selection is None else selection.rows_of(chunk)
