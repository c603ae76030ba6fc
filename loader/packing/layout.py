"""Layout of sequences: the part of each document that lies in each sequence, and its place there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .best_fit import best_fit

if TYPE_CHECKING:
    from ..columns import IntArray
    from .config import LongDocuments, PackingMethod


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
