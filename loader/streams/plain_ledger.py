"""The facts of an epoch of which nothing is dropped or packed: arithmetic, known on every rank from the start."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..order.cursors import Cursors
from ..order.outputs import keeper_ranks
from ..order.plan import lane_sizes
from .channel import MemoryChannel
from .ledger import EpochLedger


class PlainLedger(EpochLedger):
    """Each input is an output; so all are known, and nothing is told to other ranks."""

    def __init__(self, num_samples: int, *, lanes: int, rank: int, world_size: int) -> None:
        super().__init__(MemoryChannel(), "", lanes=lanes, rank=rank, world_size=1)
        self._keepers = keeper_ranks(lanes, world_size)
        self.totals = lane_sizes(num_samples, lanes)
        self.known = self.totals.copy()

    def begin_at(self, cursors: Cursors) -> None:
        pass

    def note(self, lane: int, anchors: Sequence[tuple[int, int]], outputs: int, *, is_end: bool) -> None:
        pass

    def anchor_before(self, lane: int, outputs: int) -> tuple[int, int]:
        """The input before an output's: work may begin at any."""
        before = max(0, outputs - 1)
        return before, before

    def cursors_at(self, position: int) -> Cursors:
        taken = self.taken_at(position)
        before = np.maximum(taken - 1, 0)
        return Cursors(before, before, taken)
