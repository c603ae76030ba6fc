"""Best-fit decreasing: assign pieces to sequences so that few tokens are padding and no piece is cut.

The algorithm of Ding et al. 2024, "Fewer Truncations Improve Language Modeling" (arXiv 2404.10830), section 3: pieces
from the longest to the shortest, each into the open sequence with the least room that is enough. Their segment tree
over rooms is one integer here, whose bit r says that some open sequence has room r; a shift and the lowest set bit find
the best fit. Pieces of one length are placed together: a sequence with room r takes r // length of them, which is what
best fit does one by one, since a sequence that was the best fit and still has room for the next is its best fit again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..columns import IntArray


def best_fit(lengths: IntArray, seq_len: int) -> tuple[IntArray, int]:
    """The sequence of each piece, (n,) int64, and the number of sequences, numbered as they were opened.

    Lengths are 1 to ``seq_len``. Among sequences of equal room the one that got it last is taken. About a microsecond
    for each different (length, room), less for each piece.
    """
    count = len(lengths)
    if not count:
        return np.empty(0, np.int64), 0
    narrow = lengths.astype(np.uint16) if seq_len < 1 << 16 else lengths  # numpy sorts 16 bits by radix
    decreasing = np.argsort(~narrow if narrow.dtype == np.uint16 else -narrow, kind="stable")
    ordered = lengths[decreasing]
    starts = np.flatnonzero(np.diff(ordered, prepend=0))
    placed: list[int] = []  # the sequence of each piece, in decreasing order of length
    with_room: dict[int, list[int]] = {}
    rooms = 0
    opened = 0
    for length, number in zip(ordered[starts].tolist(), np.diff(starts, append=count).tolist(), strict=True):
        while number:
            enough = rooms >> length
            if enough:
                room = length + (enough & -enough).bit_length() - 1
                fitting = with_room[room]
                times = room // length
                full = min(number // times, len(fitting))
            else:
                room, times = seq_len, seq_len // length
                full = number // times
                needed = full or 1
                fitting = list(range(opened + needed - 1, opened - 1, -1))
                opened += needed
                rooms |= 1 << room
                with_room[room] = fitting
            if full:
                taken = fitting[: -full - 1 : -1]
            else:  # the last pieces of this length leave the sequence with room for more
                full, times = 1, number
                taken = fitting[-1:]
            del fitting[-full:]
            if not fitting:
                rooms ^= 1 << room
            placed += taken if times == 1 else [sequence for sequence in taken for _ in range(times)]
            number -= full * times
            left = room - length * times
            if left:
                if rooms >> left & 1:
                    with_room[left] += taken
                else:
                    with_room[left] = taken
                    rooms |= 1 << left
    sequences = np.empty(count, np.int64)
    sequences[decreasing] = placed
    return sequences, opened
