"""Batches of sequences that sources of a mixture packed, each of its own documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..metrics import Counters
from ..streams.packed_batch import PackedBatch, PackedRow, count_packed
from .sources import SOURCE


class MixedPackedBatch(UnfinishedBatch):
    """A batch of sequences of several sources; what is in those of each source is added to its ``counts``."""

    def __init__(self, maker: BatchMaker, rows: Sequence[tuple[int, PackedRow]], counts: Sequence[Counters]) -> None:
        self._rows = rows
        self._counts = counts
        sources = np.array([source for source, _ in rows], np.int64)
        extra = {SOURCE: sources} if maker.options.with_ids else {}
        self._inner = PackedBatch(maker, [row for _, row in rows], len(rows), len(rows), extra)

    def result(self) -> Any:
        batch = self._inner.result()
        for source, row in self._rows:
            count_packed(self._counts[source], row.packed, np.array([row.row]))
        return batch

    def cancel(self) -> None:
        self._inner.cancel()
