"""Documents of one unit of packing: their tokens end to end, where each begins, and which tokens count as targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..columns import AnyArray, IntArray


@dataclass(frozen=True, slots=True)
class Documents:
    """n documents: document i is ``tokens[offsets[i]:offsets[i + 1]]``; empty ones are allowed.

    ``tokens`` is (T,) of integers, ``offsets`` (n + 1,) int64 from 0 to T, ``loss_mask`` (T,) bool, true for tokens
    that count as targets, or None where all do.
    """

    tokens: AnyArray
    offsets: IntArray
    loss_mask: AnyArray | None = None

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> IntArray:
        """(n,) int64: tokens of each."""
        return np.diff(self.offsets)

    def end_with(self, eos: int) -> Documents:
        """The same documents with ``eos`` after each that does not end with it; empty ones stay empty."""
        filled = np.flatnonzero(self.lengths)
        last = self.offsets[filled + 1] - 1
        open_ended = filled[self.tokens[last] != eos]
        if not len(open_ended):
            return self
        at = self.offsets[open_ended + 1]
        added = np.zeros(len(self), np.int64)
        added[open_ended] = 1
        wide = np.result_type(self.tokens.dtype, np.min_scalar_type(eos))
        tokens = np.insert(self.tokens.astype(wide, copy=False), at, eos)
        mask = None if self.loss_mask is None else np.insert(self.loss_mask, at, self.loss_mask[at - 1])
        return Documents(tokens, _offsets(self.lengths + added), mask)

    def split_after(self, eos: int) -> tuple[Documents, IntArray]:
        """Documents that end where a token is ``eos``, and which of these documents each was cut from, (m,) int64."""
        ends = np.union1d(np.flatnonzero(self.tokens == eos) + 1, self.offsets)  # an empty document is none any more
        origins = np.searchsorted(self.offsets, ends[:-1], side="right") - 1
        return Documents(self.tokens, ends, self.loss_mask), origins


def _offsets(lengths: IntArray) -> IntArray:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
