"""The assembler of a loader that drops samples: epoch after epoch, the outputs of lanes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ..errors import PartitionError
from ..order.cursors import Cursors
from ..order.plan import EpochPlan, next_power_of_two, share_bounds
from ..order.selecting.selection import Selection
from ..pipeline.assembler import Equipment, Start, pick_uses, steps_at_once
from ..pipeline.tuning import mean_row_bytes
from ..ranks.ledger import Ledgers, order_key
from .epoch_run import EpochRun, StreamOptions
from .epoch_supply import FeedOptions
from .work import WindowWork

_ANCHOR_BYTES = 1 << 18  # about so much of a lane is worked on again at a resume
_MOST_SAMPLES = 1024  # of one round


class StreamAssembler:
    """Runs epochs; what they have in common. Used by the pipeline's thread."""

    def __init__(
        self,
        equipment: Equipment,
        start: Start,
        *,
        last_batch: str,
        selection: Selection | None,
        make_work: Callable[[Equipment], WindowWork],
        is_logged: bool,
        ledgers: Ledgers,
    ) -> None:
        self._equipment = equipment
        self._start = start
        self._selection = selection
        self._ledgers = ledgers
        self._work = make_work(equipment)
        world_size = start.share.world_size
        self._options = StreamOptions(
            last_batch=last_batch,
            steps_at_once=steps_at_once(equipment.options, start.share.batch_size, self._work.output_bytes),
            feeding=choose_feeding(self._work, equipment),
            is_logged=is_logged,
        )
        sizes = np.diff(share_bounds(np.array([start.share.global_batch_size]), world_size, start.share.weights)[0])
        if not sizes.all():
            raise PartitionError(
                f"shares={list(start.share.weights or ())} of a global batch of {start.share.global_batch_size} leave "
                f"nothing to rank {int(sizes.argmin())}; where samples are dropped, each rank needs one at least"
            )
        ledgers.open(order_key(start.order), start.order.lanes, start.epoch)  # refuses ranks without a channel
        self._running: EpochRun | None = None
        self._next: EpochRun | None = None

    def run(self) -> None:
        running = self._running = self._make_run(self._start.epoch, self._start.position, self._start.cursors)
        while running.run():
            running = self._running = self._next or self._make_run(running.epoch + 1, 0, None)
            self._next = None

    def _read_next(self) -> None:
        """Request the next epoch's first chunks: of the running one all are requested."""
        if self._next is None:
            assert self._running is not None
            self._next = self._make_run(self._running.epoch + 1, 0, None)
        self._next.supply.feeds.look_ahead()

    def _make_run(self, epoch: int, position: int, cursors: Cursors | None) -> EpochRun:
        order, manifest = self._start.order, self._equipment.source.manifest
        return EpochRun(
            EpochPlan(manifest.samples, order, epoch, self._selection),
            self._start.share,
            self._work,
            self._equipment,
            self._ledgers.open(order_key(order), order.lanes, epoch),
            self._options,
            position=position,
            cursors=cursors,
            read_next=self._read_next,
        )

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        assert self._running is not None
        uses = self._running.supply.next_uses()
        return pick_uses(chunks, uses)

    def fail(self, error: Exception) -> None:
        if self._running is not None:
            self._running.supply.tell_error(error)

    def waiting_for(self) -> dict[str, Any] | None:
        waiting = None if self._running is None else self._running.supply.waiting
        if waiting is None:
            return None
        what, since = waiting
        return {"waiting_for": what, "since_s": round(time.perf_counter() - since, 1)}


def choose_feeding(work: WindowWork, equipment: Equipment, sources: int = 1, *, patience: int = 0) -> FeedOptions:
    """How the outputs of one of several sources are found, which share what memory there is."""
    row_bytes = mean_row_bytes(equipment.source.manifest)
    round_rows = max(64, equipment.options.span_bytes // sources // row_bytes)
    if work.gives_samples:  # which take memory until they are due: enough at once to keep all threads busy
        round_rows = min(_MOST_SAMPLES, max(64, round_rows // 4))
    return FeedOptions(
        spacing=anchor_spacing(row_bytes) if work.one_each else work.unit,
        round_rows=round_rows,
        room_bytes=equipment.options.batch_budget_bytes // sources,
        patience=patience,
    )


def anchor_spacing(row_bytes: int) -> int:
    """Every how many inputs work on a lane may begin again; decided by the data set alone, so alike on every rank."""
    return min(1024, max(16, next_power_of_two(_ANCHOR_BYTES // row_bytes)))
