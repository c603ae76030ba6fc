"""From documents to sequences: arrays of whole units, by a few passes of numpy over the tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..columns import AnyArray, IntArray
from .config import Packing
from .documents import Documents
from .layout import Layout, lay_out


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingCounts:
    """What went into sequences and what did not; tokens include the ``eos`` that packing added."""

    documents: int = 0
    tokens: int = 0
    sequences: int = 0
    sequence_tokens: int = 0
    cut_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Packed:
    """n sequences: ``fields`` are (n, seq_len) arrays; those that ``Packing`` describes and that rows of a batch have.

    ``rows`` (p,) int64 are the samples' rows whose pieces lie in the sequences, in that order; sequence s has those
    from ``bounds[s]`` to ``bounds[s + 1]``. ``is_first`` (p,) bool: whether a piece is its sample's first, so that each
    sample that is packed counts once. Samples without a piece are ``left_out``, (k,) int64 rows: too long, or empty.
    """

    fields: Mapping[str, AnyArray]
    rows: IntArray
    bounds: IntArray
    is_first: AnyArray
    left_out: IntArray
    counts: PackingCounts

    def __len__(self) -> int:
        return len(self.bounds) - 1


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
    is_first = _find_first(layout, row_of)
    left_out = np.ones(samples, np.bool_)
    left_out[row_of] = False
    return Packed(
        _fill(documents, layout, packing),
        row_of,
        layout.bounds,
        is_first,
        np.flatnonzero(left_out),
        _count(documents, layout, packing.seq_len),
    )


def _find_first(layout: Layout, row_of: IntArray) -> AnyArray:
    """(p,) bool: the pieces with which their samples begin."""
    in_order = np.lexsort((layout.pieces.start, layout.pieces.document))
    is_first = np.zeros(len(row_of), np.bool_)
    is_first[in_order[np.diff(row_of[in_order], prepend=-1) != 0]] = True
    return is_first


def _fill(documents: Documents, layout: Layout, packing: Packing) -> dict[str, AnyArray]:
    """The (n, seq_len) arrays. Padding is laid as one more piece at the end of each sequence that is not full."""
    shape = (layout.sequences, packing.seq_len)
    pieces, bounds = layout.pieces, layout.bounds
    totals = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces.length, out=totals[1:])
    missing = packing.seq_len - np.diff(totals[bounds])
    partly = np.flatnonzero(missing)
    at = bounds[partly + 1]
    lengths = np.insert(pieces.length, at, missing[partly])
    sources = np.insert(documents.offsets[pieces.document] + pieces.start, at, 0)
    numbers = np.arange(len(pieces)) - np.repeat(bounds[:-1], np.diff(bounds))
    numbers = np.insert(numbers, at, -1).astype(np.int32)
    begins = np.cumsum(lengths) - lengths

    positions = np.arange(shape[0] * shape[1]) - np.repeat(begins, lengths)
    document_ids = np.repeat(numbers, lengths)
    is_padding = document_ids < 0
    where = positions + np.repeat(sources, lengths)
    # Padding points at any token that there is, and is overwritten.
    tokens = documents.tokens.take(where, mode="clip").astype(np.int64, copy=False)
    tokens[is_padding] = packing.pad
    loss_mask = (positions > 0) & ~is_padding
    if documents.loss_mask is not None:
        loss_mask &= documents.loss_mask.take(where, mode="clip")
    return {
        "tokens": tokens.reshape(shape),
        "position_ids": positions.reshape(shape),
        "document_ids": document_ids.reshape(shape),
        "loss_mask": loss_mask.reshape(shape),
    }


def _count(documents: Documents, layout: Layout, seq_len: int) -> PackingCounts:
    lengths, pieces = documents.lengths, layout.pieces
    numbers = np.bincount(pieces.document, minlength=len(documents))
    packed = np.zeros(len(documents), np.int64)
    np.add.at(packed, pieces.document, pieces.length)
    is_out = numbers == 0
    short = np.where(is_out, 0, lengths - packed)
    return PackingCounts(
        documents=int(np.count_nonzero(numbers)),
        tokens=int(packed.sum()),
        sequences=layout.sequences,
        sequence_tokens=layout.sequences * seq_len,
        cut_documents=int(np.count_nonzero(numbers > 1)),
        truncated_documents=int(np.count_nonzero(short)),
        truncated_tokens=int(short.sum()),
        dropped_documents=int(np.count_nonzero(is_out)),
        dropped_tokens=int(lengths[is_out].sum()),
    )


def cumulative_lengths(position_ids: AnyArray) -> tuple[AnyArray, int]:
    """``cu_seqlens`` (D + 1,) int32 of all tokens of (B, seq_len) rows laid end to end, and the longest of D documents.

    A document, or a sequence's padding, begins wherever positions begin again.
    """
    begins = np.flatnonzero(position_ids.reshape(-1) == 0)
    bounds = np.append(begins, position_ids.size)
    return bounds.astype(np.int32), int(np.diff(bounds).max(initial=0))
