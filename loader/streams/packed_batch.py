"""Batches of packed sequences: their rows are filled when they are wanted."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..columns import IntArray
from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..decoding.batch_options import IDS, VALID
from ..errors import LoaderClosedError
from ..metrics import Counters
from ..packing.packed import Packed, add_counts, cumulative_lengths, fill, join_segments
from .work import Collected, StepRows


@dataclass(frozen=True, slots=True)
class PackedUnit:
    """The sequences of a unit; ``piece_ids`` are the sample ids of all pieces in them, ``fields`` those of batches."""

    packed: Packed
    piece_ids: IntArray
    fields: Collection[str]

    def ids(self, row: int) -> IntArray:
        """The sample ids of a sequence's documents, by their ``document_ids``."""
        low, high = self.packed.layout.bounds[row : row + 2]
        return self.piece_ids[low:high]


LENGTHS = ("cu_seqlens", "max_seqlen")  # of a batch's documents
Made = tuple[Any, dict[str, int]]  # a batch, and what it adds to the metrics


def start_batches(
    maker: BatchMaker, outputs: Collected, steps: Sequence[StepRows], extra: Mapping[str, IntArray] | None = None
) -> Iterator[UnfinishedBatch]:
    """The batches of some steps; each output is a row of a ``PackedUnit``. ``extra``: fields besides, (outputs,) each.

    One job of the pool makes their arrays, of which batches are views: threads that make many small arrays at the same
    time mostly wait for one another. Only what ``collate`` makes has a job a batch, so that its errors are those of its
    own batch.
    """
    together = [steps] if maker.options.collate is None else [[step] for step in steps]
    for some in together:
        future = maker.pool.submit(_make, maker, outputs, some, extra or {})
        for place, step in enumerate(some):
            yield PackedBatch(maker, future, place, step.num_rows)


@dataclass(frozen=True, slots=True)
class PackedBatch(UnfinishedBatch):
    """The batch of one of the steps that ``future`` makes. Fields: see ``Packing``."""

    maker: BatchMaker
    future: Future[list[Made]]
    place: int
    num_rows: int

    def result(self) -> Any:
        try:
            made = self.future.result()
        except CancelledError as exc:
            raise LoaderClosedError("the loader was closed while a batch was being made") from exc
        batch, counted = made[self.place]
        made[self.place] = None, {}  # batches live as long as whoever took them wants
        self.maker.counters.add(**counted)
        return self.maker.finish(batch, self.num_rows)

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def cancel(self) -> None:
        self.future.cancel()


def _make(
    maker: BatchMaker, outputs: Collected, steps: Sequence[StepRows], extra: Mapping[str, IntArray]
) -> list[Made]:
    """On a thread of the pool."""
    picked = [step.picked for step in steps]
    every = [i for each in picked for i in each]
    units: list[PackedUnit] = [outputs.samples[i] for i in every]
    packs, rows = [unit.packed for unit in units], outputs.rows[every].tolist()
    seq_len, names = packs[0].seq_len, units[0].fields
    filled = {**fill(packs, rows, seq_len, names), **{name: values[every] for name, values in extra.items()}}
    segments = join_segments(packs, rows)
    ends = np.cumsum(segments)
    amounts = np.array([packed.counts_by_sequence[row] for packed, row in zip(packs, rows, strict=True)])
    made = []
    stop = 0
    for step, each in zip(steps, picked, strict=True):
        start, stop = stop, stop + len(each)
        last = start + step.num_rows
        low, high = np.searchsorted(ends, [start * seq_len, last * seq_len], side="right")
        fields: dict[str, Any] = {name: values[start:last] for name, values in filled.items()}
        if maker.options.collate is None:
            lengths = dict(zip(LENGTHS, cumulative_lengths(segments[low:high]), strict=True))
            fields.update((name, value) for name, value in lengths.items() if name in names)
        counted = _amounts(amounts[start : start + step.num_valid].sum(axis=0), seq_len)
        made.append((_finish(maker, fields, units[start:last], rows[start:last], step.num_valid), counted))
    return made


def _finish(
    maker: BatchMaker, fields: dict[str, Any], units: Sequence[PackedUnit], rows: Sequence[int], num_valid: int
) -> Any:
    """A batch of rows whose ``fields`` are filled, of which ``num_valid`` count."""
    options = maker.options
    if options.pad:
        fields[VALID] = np.arange(len(rows)) < num_valid
    if options.collate is not None:
        samples = [{name: values[i] for name, values in fields.items()} for i in range(len(rows))]
        for sample, unit, row in zip(samples, units, rows, strict=True):
            if options.with_ids:
                sample[IDS] = unit.ids(row)
            if options.pad:
                sample[VALID] = bool(sample[VALID])
        return options.collate(samples)
    if options.with_ids:
        fields[IDS] = lay_side_by_side([unit.ids(row) for unit, row in zip(units, rows, strict=True)])
    return {
        n: torch.from_numpy(of_field) if isinstance(of_field, np.ndarray) else of_field
        for n, of_field in fields.items()
    }


def count_packed(counters: Counters, packed: Packed, sequences: IntArray) -> None:
    """Add what some rows of ``counts_by_sequence`` hold to the metrics."""
    counters.add(**_amounts(packed.counts_by_sequence[sequences].sum(axis=0), packed.seq_len))


def _amounts(sums: IntArray, seq_len: int) -> dict[str, int]:
    counts = add_counts(sums)
    return {
        "packed_sequences": counts.sequences,
        "packed_documents": counts.documents,
        "packed_tokens": counts.tokens,
        "padding_tokens": counts.sequences * seq_len - counts.tokens,
        "cut_documents": counts.cut_documents,
        "truncated_documents": counts.truncated_documents,
        "truncated_tokens": counts.truncated_tokens,
        "dropped_documents": counts.dropped_documents,
        "dropped_tokens": counts.dropped_tokens,
    }


def lay_side_by_side(arrays: Sequence[IntArray]) -> IntArray:
    """(n, longest) int64 of n arrays, filled up with -1."""
    table = np.full((len(arrays), max(map(len, arrays), default=0)), -1, np.int64)
    for row, array in enumerate(arrays):
        table[row, : len(array)] = array
    return table
