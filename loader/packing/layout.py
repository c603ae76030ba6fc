"""Which part of which document lies where in which sequence."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..columns import IntArray
from .best_fit import best_fit
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

    def pieces_of(self, sequences: IntArray) -> tuple[IntArray, IntArray]:
        """The pieces of some sequences, and the place of each in its sequence, (q,) int64 each."""
        counts = np.diff(self.bounds)[sequences]
        places = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
        return np.repeat(self.bounds[sequences], counts) + places, places


def lay_out(lengths: IntArray, seq_len: int, method: PackingMethod, long_documents: LongDocuments) -> Layout:
    """Where each document goes, by their lengths (n,) alone; the same on any rank."""
    pieces = cut_long(lengths, seq_len, long_documents)
    if method == "concat":
        pieces = cut_run(pieces, seq_len)
        ends = np.cumsum(pieces.length)
        sequences = (ends - 1) // seq_len
        count = int(sequences[-1]) + 1 if len(pieces) else 0
    else:
        sequences, count = best_fit(pieces.length, seq_len)
        sequences = _in_order_of_openers(sequences, pieces.length, count)
        order = np.argsort(sequences, kind="stable")
        pieces, sequences = pieces.take(order), sequences[order]
    bounds = np.searchsorted(sequences, np.arange(count + 1))
    return Layout(pieces, bounds.astype(np.int64))


def cut_long(lengths: IntArray, seq_len: int, policy: LongDocuments) -> Pieces:
    """One piece for each document that fits; the others as the policy says. Empty documents have none.

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
    return Pieces(document, start, np.minimum(lengths[document] - start, seq_len))


def cut_run(pieces: Pieces, seq_len: int) -> Pieces:
    """Pieces laid end to end, cut every ``seq_len`` tokens; none is longer than that."""
    ends = np.cumsum(pieces.length)
    begins = ends - pieces.length
    cut_at = (begins // seq_len + 1) * seq_len
    is_cut = cut_at < ends
    numbers = 1 + is_cut
    which = np.repeat(np.arange(len(pieces)), numbers)
    is_rest = np.diff(which, prepend=-1) == 0
    kept = np.where(is_cut, cut_at - begins, pieces.length)[which]
    start = pieces.start[which] + np.where(is_rest, kept, 0)
    return Pieces(pieces.document[which], start, np.where(is_rest, pieces.length[which] - kept, kept))


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
