"""Batches of packed sequences: their rows are filled when they are wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..columns import AnyArray, IntArray
from ..decoding.batch import IDS, VALID, BatchMaker, UnfinishedBatch
from ..errors import LoaderClosedError
from ..metrics import Counters
from ..packing.packed import Packed, add_counts, cumulative_lengths, fill, join_segments


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One sequence: a row of ``packed``; ``ids`` are the sample ids of its documents, by their ``document_ids``."""

    packed: Packed
    row: int
    ids: IntArray


class PackedBatch(UnfinishedBatch):
    """The first ``num_rows`` of some sequences as a batch, of which ``num_valid`` count. Fields: see ``Packing``."""

    def __init__(
        self,
        maker: BatchMaker,
        rows: Sequence[PackedRow],
        num_rows: int,
        num_valid: int,
        extra: Mapping[str, IntArray] | None = None,
    ) -> None:
        """``extra``: fields besides, (rows,) each."""
        self._extra = extra or {}
        self._maker = maker
        self._rows = rows
        self._num_rows = num_rows
        self._num_valid = num_valid
        self._future = maker.pool.submit(self._make)

    def result(self) -> Any:
        try:
            batch, counted = self._future.result()
        except CancelledError as exc:
            raise LoaderClosedError("the loader was closed while a batch was being made") from exc
        self._maker.counters.add(**counted)
        return self._maker.finish(batch, self._num_rows)

    def _make(self) -> tuple[Any, dict[str, int]]:
        """The batch and what it adds to the metrics. On a thread of the pool."""
        rows, options = self._rows, self._maker.options
        fields, counted = self._fill()
        every: dict[str, Any] = {**fields, **self._extra}
        batch: dict[str, Any] = {name: values[: self._num_rows] for name, values in every.items()}
        if options.pad:
            batch[VALID] = np.arange(self._num_rows) < self._num_valid
        if options.collate is not None:
            samples = [{name: values[i] for name, values in batch.items()} for i in range(self._num_rows)]
            for sample, row in zip(samples, rows, strict=False):
                if options.with_ids:
                    sample[IDS] = row.ids
                if options.pad:
                    sample[VALID] = bool(sample[VALID])
            return options.collate(samples), counted
        bounds, longest = cumulative_lengths(join_segments([(row.packed, row.row) for row in rows[: self._num_rows]]))
        if options.with_ids:
            batch[IDS] = lay_side_by_side([row.ids for row in rows[: self._num_rows]])
        batch["cu_seqlens"] = bounds
        tensors = {name: torch.from_numpy(values) for name, values in batch.items()}
        return {**tensors, "max_seqlen": longest}, counted

    def _fill(self) -> tuple[dict[str, AnyArray], dict[str, int]]:
        """The arrays of all rows, and what those that count add to the metrics."""
        rows = [(row.packed, row.row) for row in self._rows]
        seq_len = rows[0][0].seq_len
        amounts = np.zeros(8, np.int64)
        for packed, row in rows[: self._num_valid]:
            amounts += packed.counts_by_sequence[row]
        return fill(rows, seq_len), _amounts(amounts, seq_len)

    def cancel(self) -> None:
        self._future.cancel()


def count_packed(counters: Counters, packed: Packed, sequences: IntArray) -> None:
    """Add what some rows of ``counts_by_sequence`` hold to the metrics."""
    counters.add(**_amounts(packed.counts_by_sequence[sequences].sum(axis=0), packed.seq_len))


def _amounts(sums: IntArray, seq_len: int) -> dict[str, int]:
    counts = add_counts(sums)
    return {
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
