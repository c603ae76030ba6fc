"""From documents to sequences: what is packed stays small until its rows are wanted, which are filled by numpy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

import numpy as np

from ..columns import AnyArray, IntArray, join_slices
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
    """n sequences of documents, kept small: ``fill`` makes the arrays of a batch.

    ``tokens`` (n, seq_len) in a dtype that is wide enough, padding included; ``loss_mask`` (n, seq_len) bool as samples
    gave it, or None. ``segments`` (g,) int64 are the lengths of what lies in the sequences, pieces and then padding;
    those of sequence s from ``segment_bounds[s]`` to ``segment_bounds[s + 1]``; ``is_padded`` (n,) bool.

    ``rows`` (p,) int64 are the samples' rows whose pieces lie in the sequences, in that order; sequence s has those
    from ``layout.bounds[s]`` to ``layout.bounds[s + 1]``. ``is_first`` (p,) bool: whether no piece of its sample comes
    before, so that each sample that is packed counts once. Samples without a piece are ``left_out``, (k,) int64 rows:
    too long, or empty. ``lengths`` (d,) int64 are those of the documents.
    """

    tokens: AnyArray
    loss_mask: AnyArray | None
    segments: IntArray
    segment_bounds: IntArray
    is_padded: AnyArray
    layout: Layout
    lengths: IntArray
    rows: IntArray
    is_first: AnyArray
    left_out: IntArray

    def __len__(self) -> int:
        return self.layout.sequences

    @property
    def seq_len(self) -> int:
        return int(self.tokens.shape[1])

    @property
    def nbytes(self) -> int:
        """Bytes that it keeps, about."""
        mask = 0 if self.loss_mask is None else self.loss_mask.nbytes
        return int(self.tokens.nbytes + mask + 60 * len(self.rows))

    @property
    def fields(self) -> Mapping[str, AnyArray]:
        """The arrays of all sequences."""
        return fill([(self, row) for row in range(len(self))], self.seq_len)

    @cached_property
    def counts_by_sequence(self) -> IntArray:
        """(n, 8) int64: what each sequence adds to ``PackingCounts``, in the order of its fields.

        A document counts where its first piece is; those that are left out count with the last sequence, or, where
        there is none, in the one row of (1, 8).
        """
        layout, lengths, count = self.layout, self.lengths, len(self)
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
    assert not isinstance(packing.eos, str), "a packer names tokens by id"
    assert not isinstance(packing.pad, str), "a packer names tokens by id"
    if packing.eos is not None:
        documents = documents.end_with(packing.eos)
    layout = lay_out(documents.lengths, packing.seq_len, packing.method, packing.long_documents)
    row_of = rows[layout.pieces.document]
    is_first = np.zeros(len(row_of), np.bool_)
    is_first[np.unique(row_of, return_index=True)[1]] = True
    is_out = np.ones(samples, np.bool_)
    is_out[row_of] = False
    segments, sources, segment_bounds, is_padded = _lay_segments(documents, layout, packing.seq_len)
    dtype = np.result_type(_narrow(documents.tokens).dtype, np.min_scalar_type(packing.pad))
    tokens = _rearrange(documents.tokens.astype(dtype, copy=False), sources, segments, packing.pad, packing.seq_len)
    mask = None
    if documents.loss_mask is not None:
        mask = _rearrange(documents.loss_mask, sources, segments, 0, packing.seq_len)
    return Packed(
        tokens,
        mask,
        segments,
        segment_bounds,
        is_padded,
        layout,
        documents.lengths,
        row_of,
        is_first,
        np.flatnonzero(is_out),
    )


def _narrow(tokens: AnyArray) -> AnyArray:
    """Token ids in at most four bytes each, where they fit."""
    if tokens.dtype.itemsize <= 4 or not len(tokens):
        return tokens
    return tokens[:0].astype(np.int32) if int(tokens.max()) <= np.iinfo(np.int32).max else tokens


def _lay_segments(documents: Documents, layout: Layout, seq_len: int) -> tuple[IntArray, IntArray, IntArray, AnyArray]:
    """The lengths of pieces and paddings in the order of sequences, where each begins among the documents' tokens (-1
    for padding), the bounds of sequences among them, and which sequences have padding."""
    pieces, bounds = layout.pieces, layout.bounds
    totals = np.zeros(len(pieces) + 1, np.int64)
    np.cumsum(pieces.length, out=totals[1:])
    missing = seq_len - np.diff(totals[bounds])
    partly = np.flatnonzero(missing)
    segments = np.insert(pieces.length, bounds[partly + 1], missing[partly])
    sources = np.insert(documents.offsets[pieces.document] + pieces.start, bounds[partly + 1], -1)
    is_padded = missing > 0
    segment_bounds = bounds + np.concatenate([[0], np.cumsum(is_padded)])
    return segments, sources, segment_bounds, is_padded


def _rearrange(values: AnyArray, sources: IntArray, segments: IntArray, pad: int, seq_len: int) -> AnyArray:
    """(n, seq_len) of the segments of ``values`` that begin at ``sources``, and of ``pad`` for those at -1."""
    given, padding = np.ascontiguousarray(values).data, np.full(seq_len, pad, values.dtype).data
    slices = [
        given[source : source + length] if source >= 0 else padding[:length]
        for source, length in zip(sources.tolist(), segments.tolist(), strict=True)
    ]
    return join_slices(slices, values.dtype).reshape(-1, seq_len)


def fill(rows: Sequence[tuple[Packed, int]], seq_len: int) -> dict[str, AnyArray]:
    """The arrays of a batch of sequences, (m, seq_len) each; see ``Packing`` for what they hold."""
    count = len(rows)
    segments = join_segments(rows)
    numbers = np.fromiter(
        (packed.segment_bounds[row + 1] - packed.segment_bounds[row] for packed, row in rows), np.int64, count
    )
    stops = np.cumsum(numbers)
    documents = np.arange(len(segments)) - np.repeat(stops - numbers, numbers)
    is_padded = np.fromiter((packed.is_padded[row] for packed, row in rows), np.bool_, count)
    documents[stops[is_padded] - 1] = -1
    document_ids = np.repeat(documents.astype(np.int32), segments)
    upwards = np.arange(segments.max(initial=0), dtype=np.int64).data
    positions = join_slices([upwards[:length] for length in segments.tolist()], np.dtype(np.int64))
    loss_mask = document_ids >= 0
    loss_mask[np.cumsum(segments) - segments] = False
    loss_mask = loss_mask.reshape(count, seq_len)
    for place, (packed, row) in enumerate(rows):
        if packed.loss_mask is not None:
            loss_mask[place] &= packed.loss_mask[row]
    made = (_join_tokens(rows), positions, document_ids, loss_mask)
    return {name: values.reshape(count, seq_len) for name, values in zip(FIELDS, made, strict=True)}


def _join_tokens(rows: Sequence[tuple[Packed, int]]) -> AnyArray:
    """The tokens of some sequences end to end, int64."""
    tokens = [packed.tokens[row] for packed, row in rows]
    dtypes = {one.dtype for one in tokens}
    if len(dtypes) == 1:
        return join_slices([one.data for one in tokens], dtypes.pop()).astype(np.int64)
    return np.concatenate([np.empty(0, np.int64), *tokens], dtype=np.int64)


def join_segments(rows: Sequence[tuple[Packed, int]]) -> IntArray:
    """(D,) int64: the lengths of the documents in some sequences, laid end to end, and of each sequence's padding."""
    lengths = [packed.segments[packed.segment_bounds[row] : packed.segment_bounds[row + 1]] for packed, row in rows]
    return np.concatenate([np.empty(0, np.int64), *lengths])


def cumulative_lengths(segments: IntArray) -> tuple[AnyArray, int]:
    """``cu_seqlens`` (D + 1,) int32 of D documents of these lengths, and the longest."""
    bounds = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(segments, out=bounds[1:])
    return bounds, int(segments.max(initial=0))
