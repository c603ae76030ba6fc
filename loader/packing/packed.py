"""From documents to sequences: what is packed stays small until its rows are wanted, which are filled by numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ..columns import AnyArray, IntArray
from .config import Packing
from .documents import Documents
from .layout import Layout, lay_out

FIELDS = ("tokens", "position_ids", "document_ids", "loss_mask")


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingCounts:
    """What went into sequences and what did not; tokens include the ``eos`` that packing added."""

    sequences: int = 0
    tokens: int = 0
    documents: int = 0
    cut_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True)
class Packed:
    """n sequences of documents. Keeps the documents' own tokens; ``fill`` makes the (n, seq_len) arrays.

    ``rows`` (p,) int64 are the samples' rows whose pieces lie in the sequences, in that order; sequence s has those
    from ``layout.bounds[s]`` to ``layout.bounds[s + 1]``. ``is_first`` (p,) bool: whether no piece of its sample comes
    before, so that each sample that is packed counts once. Samples without a piece are ``left_out``, (k,) int64 rows:
    too long, or empty.
    """

    documents: Documents
    layout: Layout
    packing: Packing
    rows: IntArray
    is_first: AnyArray
    left_out: IntArray

    def __len__(self) -> int:
        return self.layout.sequences

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps."""
        mask = self.documents.loss_mask
        return int(self.documents.tokens.nbytes + (0 if mask is None else mask.nbytes) + 50 * len(self.rows))

    def fill(self, sequences: IntArray) -> dict[str, AnyArray]:
        """The arrays of some sequences, (m, seq_len) each; see ``Packing`` for what they hold.

        Padding is laid as one more piece at the end of each sequence that is not full.
        """
        documents, layout, seq_len = self.documents, self.layout, self.packing.seq_len
        which, numbers = layout.pieces_of(sequences)
        counts = np.diff(layout.bounds)[sequences]
        length = layout.pieces.length[which]
        totals = np.zeros(len(which) + 1, np.int64)
        np.cumsum(length, out=totals[1:])
        ends = np.cumsum(counts)
        missing = seq_len - (totals[ends] - totals[ends - counts])
        partly = np.flatnonzero(missing)
        at = ends[partly]
        lengths = np.insert(length, at, missing[partly])
        sources = np.insert(documents.offsets[layout.pieces.document[which]] + layout.pieces.start[which], at, 0)
        numbers = np.insert(numbers, at, -1).astype(np.int32)
        begins = np.cumsum(lengths) - lengths

        shape = (len(sequences), seq_len)
        positions = np.arange(shape[0] * seq_len) - np.repeat(begins, lengths)
        document_ids = np.repeat(numbers, lengths)
        is_padding = document_ids < 0
        where = positions + np.repeat(sources, lengths)
        # Padding points at any token that there is, and is overwritten.
        tokens = documents.tokens.take(where, mode="clip").astype(np.int64, copy=False)
        tokens[is_padding] = self.packing.pad
        loss_mask = (positions > 0) & ~is_padding
        if documents.loss_mask is not None:
            loss_mask &= documents.loss_mask.take(where, mode="clip")
        made = (tokens, positions, document_ids, loss_mask)
        return {name: values.reshape(shape) for name, values in zip(FIELDS, made, strict=True)}

    @property
    def fields(self) -> Mapping[str, AnyArray]:
        """The arrays of all sequences."""
        return self.fill(np.arange(len(self)))

    @cached_property
    def counts_by_sequence(self) -> IntArray:
        """(n, 8) int64: what each sequence adds to ``PackingCounts``, in the order of its fields.

        A document counts where its first piece is; those that are left out count with the last sequence, or, where
        there is none, in the one row of (1, 8).
        """
        layout, lengths, count = self.layout, self.documents.lengths, len(self)
        pieces = layout.pieces
        sequence = np.repeat(np.arange(count), np.diff(layout.bounds))
        numbers = np.bincount(pieces.document, minlength=len(lengths))
        packed = np.zeros(len(lengths), np.int64)
        np.add.at(packed, pieces.document, pieces.length)
        short = np.where(numbers == 0, 0, lengths - packed)
        is_first = np.zeros(len(pieces), np.bool_)
        is_first[np.unique(pieces.document, return_index=True)[1]] = True
        amounts = {
            "tokens": pieces.length,
            "documents": is_first,
            "cut_documents": is_first & (numbers[pieces.document] > 1),
            "truncated_documents": is_first & (short[pieces.document] > 0),
            "truncated_tokens": is_first * short[pieces.document],
        }
        found = np.zeros((max(1, count), len(_COUNTS)), np.int64)
        found[:count, _COUNTS.index("sequences")] = 1
        for name, values in amounts.items():
            np.add.at(found[:, _COUNTS.index(name)], sequence, values.astype(np.int64))
        is_out = numbers == 0
        found[-1, _COUNTS.index("dropped_documents")] = np.count_nonzero(is_out)
        found[-1, _COUNTS.index("dropped_tokens")] = lengths[is_out].sum()
        return found

    def count(self, sequences: IntArray | slice = slice(None)) -> PackingCounts:
        """The counts of some sequences."""
        return add_counts(self.counts_by_sequence[sequences].sum(axis=0))


_COUNTS = [one.name for one in fields(PackingCounts)]


def add_counts(amounts: IntArray) -> PackingCounts:
    """Counts from the sums of ``counts_by_sequence``, (8,)."""
    return PackingCounts(**dict(zip(_COUNTS, amounts.tolist(), strict=True)))


def pack_documents(documents: Documents, packing: Packing) -> Packed:
    """Pack the documents of one unit. Nothing but them and the settings decides the result.

    Documents longer than a sequence under ``long_documents="error"`` are the caller's to refuse, who can name them.
    """
    samples = len(documents)
    rows = np.arange(samples, dtype=np.int64)
    if packing.split_at is not None:
        documents, rows = documents.split_after(packing.split_at)
    if packing.eos is not None:
        assert not isinstance(packing.eos, str), "a packer names tokens by id"
        documents = documents.end_with(packing.eos)
    layout = lay_out(documents.lengths, packing.seq_len, packing.method, packing.long_documents)
    row_of = rows[layout.pieces.document]
    is_first = np.zeros(len(row_of), np.bool_)
    is_first[np.unique(row_of, return_index=True)[1]] = True
    is_out = np.ones(samples, np.bool_)
    is_out[row_of] = False
    return Packed(documents, layout, packing, row_of, is_first, np.flatnonzero(is_out))


def cumulative_lengths(position_ids: AnyArray) -> tuple[AnyArray, int]:
    """``cu_seqlens`` (D + 1,) int32 of all tokens of (B, seq_len) rows laid end to end, and the longest of D documents.

    A document, or a sequence's padding, begins wherever positions begin again.
    """
    begins = np.flatnonzero(position_ids.reshape(-1) == 0)
    bounds = np.append(begins, position_ids.size)
    return bounds.astype(np.int32), int(np.diff(bounds).max(initial=0))
