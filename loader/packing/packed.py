"""Pack documents into sequences, kept compact until their rows are wanted: their arrays are made only then."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from ..columns import AnyArray, IntArray, join_slices
from ..order.cached import cached_property
from .config import FIELDS, Packing
from .layout import Layout, lay_out


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


_AT_ONCE = 32  # sequences that are filled together


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingCounts:
    """Counts of documents and tokens, packed or not; tokens include the ``eos`` that packing added."""

    sequences: int = 0
    tokens: int = 0
    documents: int = 0
    cut_documents: int = 0
    truncated_documents: int = 0
    truncated_tokens: int = 0
    dropped_documents: int = 0
    dropped_tokens: int = 0


class _Views(NamedTuple):
    """Views of one ``Packed`` for ``fill``: memory that gives slices and integers faster than arrays do."""

    bounds: memoryview
    segments: memoryview
    sources: memoryview
    tokens: memoryview
    padding: memoryview
    loss_mask: memoryview | None
    no_mask: memoryview


@dataclass(frozen=True)
class Packed:
    """n sequences of documents, kept small: ``fill`` makes the arrays of a batch.

    ``tokens`` (T,) are those of the documents, in a dtype that is wide enough, padding included; ``loss_mask`` (T,)
    bool as samples gave it, or None. ``segments`` (g,) int64 are the lengths of what lies in the sequences, pieces and
    then padding, and ``sources`` (g,) int64 where each begins among the tokens, -1 for padding; those of sequence s
    from ``segment_bounds[s]`` to ``segment_bounds[s + 1]``; ``is_padded`` (n,) bool.

    ``rows`` (p,) int64 are the samples' rows whose pieces lie in the sequences, in that order; sequence s has those
    from ``layout.bounds[s]`` to ``layout.bounds[s + 1]``. ``is_first`` (p,) bool: whether no piece of its sample comes
    before, so that each sample that is packed counts once. Samples without a piece are ``left_out``, (k,) int64 rows:
    too long, or empty. ``lengths`` (d,) int64 are those of the documents.
    """

    seq_len: int
    pad: int
    tokens: AnyArray
    loss_mask: AnyArray | None
    segments: IntArray
    sources: IntArray
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
    def nbytes(self) -> int:
        """Bytes that it keeps, about."""
        mask = 0 if self.loss_mask is None else self.loss_mask.nbytes
        return int(self.tokens.nbytes + mask + 70 * len(self.rows))

    @cached_property
    def views(self) -> _Views:
        """The memory of some of these arrays."""
        padding = np.full(self.seq_len, self.pad, self.tokens.dtype)
        mask = None if self.loss_mask is None else np.ascontiguousarray(self.loss_mask).data
        tokens, no_mask = np.ascontiguousarray(self.tokens).data, np.zeros(self.seq_len, np.bool_).data
        bounds, segments, sources = self.segment_bounds.data, self.segments.data, self.sources.data
        return _Views(bounds, segments, sources, tokens, padding.data, mask, no_mask)

    @property
    def fields(self) -> Mapping[str, AnyArray]:
        """The arrays of all sequences."""
        return fill([self] * len(self), range(len(self)), self.seq_len)

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
    return Packed(
        seq_len=packing.seq_len,
        pad=packing.pad,
        tokens=documents.tokens.astype(dtype, copy=False),
        loss_mask=documents.loss_mask,
        segments=segments,
        sources=sources,
        segment_bounds=segment_bounds,
        is_padded=is_padded,
        layout=layout,
        lengths=documents.lengths,
        rows=row_of,
        is_first=is_first,
        left_out=np.flatnonzero(is_out),
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


def fill(
    packs: Sequence[Packed], rows: Sequence[int], seq_len: int, wanted: Collection[str] = tuple(FIELDS)
) -> dict[str, AnyArray]:
    """The arrays of some sequences, (m, seq_len) each: of ``FIELDS``, those wanted. ``Packing`` says what they hold.

    Sequence i is row ``rows[i]`` of ``packs[i]``.

    A few sequences at a time, so that what lies between stays in the processor's cache, and so that the slices of
    memory that are joined are too few to wake the interpreter's garbage collector.
    """
    count = len(rows)
    made = {name: np.empty((count, seq_len), dtype) for name, dtype in FIELDS.items() if name in wanted}
    upwards = np.arange(seq_len, dtype=np.min_scalar_type(seq_len)).data
    for low in range(0, count, _AT_ONCE):
        some = packs[low : low + _AT_ONCE], rows[low : low + _AT_ONCE]
        out = {name: values[low : low + _AT_ONCE].reshape(-1) for name, values in made.items()}
        segments = join_segments(*some)
        if "tokens" in out:
            _fill_tokens(*some, out["tokens"])
        if "position_ids" in out:
            out["position_ids"][:] = join_slices(
                [upwards[:length] for length in segments.tolist()], np.min_scalar_type(seq_len)
            )
        if "document_ids" in out or "loss_mask" in out:
            ids = np.repeat(_number_segments(*some, len(segments)), segments)
            if "document_ids" in out:
                out["document_ids"][:] = ids
            if "loss_mask" in out:
                mask = np.greater_equal(ids, 0, out=out["loss_mask"])
                mask[np.cumsum(segments) - segments] = False
                _apply_masks(*some, mask)
    return made


def _number_segments(packs: Sequence[Packed], rows: Sequence[int], total: int) -> AnyArray:
    """(total,) int32: 0, 1, ... for the documents of each sequence, -1 for its padding."""
    bounds = [packed.views.bounds for packed in packs]
    numbers = np.array([of_pack[row + 1] - of_pack[row] for of_pack, row in zip(bounds, rows, strict=True)], np.int32)
    stops = np.cumsum(numbers, dtype=np.int32)
    ids: AnyArray = np.arange(total, dtype=np.int32) - np.repeat(stops - numbers, numbers)
    is_padded = np.fromiter(
        (packed.is_padded[row] for packed, row in zip(packs, rows, strict=True)), np.bool_, len(rows)
    )
    ids[stops[is_padded] - 1] = -1
    return ids


def _fill_tokens(packs: Sequence[Packed], rows: Sequence[int], out: AnyArray) -> None:
    """Write the tokens of some sequences, end to end."""
    dtypes = {packed.tokens.dtype for packed in packs}
    if len(dtypes) > 1:
        for packed, row, own in zip(packs, rows, out.reshape(len(rows), -1), strict=True):
            _fill_tokens([packed], [row], own)
        return
    slices: list[memoryview] = []
    for packed, row in zip(packs, rows, strict=True):
        views = packed.views
        slices += _cut(views, row, views.tokens, views.padding)
    out[:] = join_slices(slices, dtypes.pop())


def _apply_masks(packs: Sequence[Packed], rows: Sequence[int], mask: AnyArray) -> None:
    """Clear the mask of these sequences where samples do."""
    for packed, row, own in zip(packs, rows, mask.reshape(len(rows), -1), strict=True):
        views = packed.views
        if views.loss_mask is not None:
            own &= join_slices(_cut(views, row, views.loss_mask, views.no_mask), np.dtype(np.bool_))


def _cut(views: _Views, row: int, values: memoryview, padding: memoryview) -> list[memoryview]:
    """The slices of ``values`` that a sequence is made of."""
    low, high = views.bounds[row], views.bounds[row + 1]
    parts = zip(views.sources[low:high].tolist(), views.segments[low:high].tolist(), strict=True)
    return [values[source : source + length] if source >= 0 else padding[:length] for source, length in parts]


def join_segments(packs: Sequence[Packed], rows: Sequence[int]) -> IntArray:
    """(D,) int64: the lengths of the documents in some sequences, laid end to end, and of each sequence's padding."""
    lengths: list[int] = []
    for packed, row in zip(packs, rows, strict=True):
        bounds, segments, *_ = packed.views
        lengths += segments[bounds[row] : bounds[row + 1]].tolist()
    return np.array(lengths, np.int64)


def cumulative_lengths(segments: IntArray) -> tuple[AnyArray, int]:
    """``cu_seqlens`` (D + 1,) int32 of D documents of these lengths, and the longest."""
    bounds = np.zeros(len(segments) + 1, np.int32)
    np.cumsum(segments, out=bounds[1:])
    return bounds, int(segments.max(initial=0))
