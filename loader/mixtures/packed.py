"""Batches of sequences that sources of a mixture packed, each of its own documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..decoding.batch import BatchMaker, UnfinishedBatch
from ..metrics import Counters
from ..sources.sources import SOURCE
from ..streams.packed_batch import PackedUnit, count_packed, start_batches
from ..streams.work import Collected, StepRows


class MixedPackedBatch(UnfinishedBatch):
    """A batch of sequences of several sources; what is in those of each source is added to its ``counts``."""

    def __init__(
        self, maker: BatchMaker, rows: Sequence[tuple[int, PackedUnit, int]], counts: Sequence[Counters]
    ) -> None:
        self._rows = rows
        self._counts = counts
        sources, units, numbers = zip(*rows, strict=True)
        extra = {SOURCE: np.array(sources, np.int64)} if maker.options.with_ids else {}
        outputs = Collected(units, np.array(numbers, np.int64), np.empty(0, np.int64))
        [self._inner] = start_batches(maker, outputs, [StepRows(0, len(rows), len(rows), len(rows))], extra)

    def result(self) -> Any:
        batch = self._inner.result()
        for source, unit, row in self._rows:
            count_packed(self._counts[source], unit.packed, np.array([row]))
        return batch

    @property
    def is_done(self) -> bool:
        return self._inner.is_done

    def cancel(self) -> None:
        self._inner.cancel()
