"""Layout of sequences: the part of each document that lies in each sequence, and its place there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from ..columns import IntArray
    from .config import LongDocuments, PackingMethod


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


@dataclass(frozen=True, slots=True)
class Pieces:
    """p pieces of documents: ``document``, ``start`` in it and ``length``, each (p,) int64, in the order of documents.

    A piece is a whole document, unless that is longer than a sequence or concatenation cuts it.
    """

    document: IntArray
    start: IntArray
    length: IntArray

    def __len__(self) -> int:
        return len(self.document)

    def take(self, which: IntArray) -> Pieces:
        return Pieces(self.document[which], self.start[which], self.length[which])


@dataclass(frozen=True, slots=True)
class Layout:
    """Pieces in the order of sequences: those of sequence s are ``bounds[s]`` to ``bounds[s + 1]``."""

    pieces: Pieces
    bounds: IntArray

    @property
    def sequences(self) -> int:
        return len(self.bounds) - 1


def lay_out(lengths: IntArray, seq_len: int, method: PackingMethod, long_documents: LongDocuments) -> Layout:
    """Lay out documents by their lengths (n,) alone; the same on any rank."""
    if method == "concat":
        # A run is cut where sequences end and nowhere else, however long documents are.
        pieces = cut_run(cut_long(lengths, seq_len, None if long_documents == "split" else long_documents), seq_len)
        ends = np.cumsum(pieces.length)
        sequences = (ends - 1) // seq_len
        count = int(sequences[-1]) + 1 if len(pieces) else 0
    else:
        pieces = cut_long(lengths, seq_len, long_documents)
        sequences, count = best_fit(pieces.length, seq_len)
        sequences = _in_order_of_openers(sequences, pieces.length, count)
        order = np.argsort(sequences, kind="stable")
        pieces, sequences = pieces.take(order), sequences[order]
    bounds = np.searchsorted(sequences, np.arange(count + 1))
    return Layout(pieces, bounds.astype(np.int64))


def cut_long(lengths: IntArray, seq_len: int, policy: LongDocuments | None) -> Pieces:
    """One piece for each document that fits; the others as the policy says, None for one piece. Empty ones have none.

    Policy "error" is the caller's, who can name the sample.
    """
    if policy == "split":
        numbers = -(-lengths // seq_len)
    elif policy == "drop":
        numbers = ((lengths > 0) & (lengths <= seq_len)).astype(np.int64)
    else:
        numbers = (lengths > 0).astype(np.int64)
    document = np.repeat(np.arange(len(lengths), dtype=np.int64), numbers)
    first = np.cumsum(numbers) - numbers
    start = (np.arange(len(document), dtype=np.int64) - np.repeat(first, numbers)) * seq_len
    length = lengths[document] - start
    return Pieces(document, start, length if policy is None else np.minimum(length, seq_len))


def cut_run(pieces: Pieces, seq_len: int) -> Pieces:
    """Pieces laid end to end, cut every ``seq_len`` tokens."""
    ends = np.cumsum(pieces.length)
    begins = ends - pieces.length
    first_sequence = begins // seq_len
    numbers = (ends - 1) // seq_len - first_sequence + 1
    which = np.repeat(np.arange(len(pieces)), numbers)
    sequence = np.arange(len(which)) + np.repeat(first_sequence - (np.cumsum(numbers) - numbers), numbers)
    low = np.maximum(begins[which], sequence * seq_len)
    high = np.minimum(ends[which], (sequence + 1) * seq_len)
    return Pieces(pieces.document[which], pieces.start[which] + low - begins[which], high - low)


def _in_order_of_openers(sequences: IntArray, lengths: IntArray, count: int) -> IntArray:
    """The same sequences, numbered by the place among the pieces of the longest of each.

    Numbered as they were opened, those with long documents would come first. The place of a piece says nothing of its
    length, and shuffled documents make shuffled sequences.
    """
    by_length = np.lexsort((np.arange(len(lengths)), -lengths, sequences))
    openers = by_length[np.searchsorted(sequences[by_length], np.arange(count))]
    rank = np.empty(count, np.int64)
    rank[np.argsort(openers)] = np.arange(count)
    return rank[sequences]
