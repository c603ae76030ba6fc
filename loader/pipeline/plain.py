"""The assembler of a plain loader: each sample of an epoch's order, gathered by whole columns, a span at a time."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..columns import Block
from ..decoding.decode import WIDENED
from ..decoding.gather import gather
from ..decoding.late.bytes import LateBytes
from ..decoding.late.rows import MOST_TOGETHER, TOGETHER_BYTES, WideRows
from ..decoding.rows import Rows
from ..order.costs.buckets import plan_epoch
from ..order.costs.costs import SampleCosts
from ..order.selecting.selection import Selection
from ..order.spans import EpochSpans, Span
from ..reading.bad.quarantine import ReplacesChunks
from .assembler import MOST_AT_ONCE, Equipment, Start, cut_step, hand_over, pick_uses, steps_at_once
from .delivery_queue import Delivery
from .look_ahead import LookAhead
from .tuning import mean_row_bytes

# A rank of W reads about a W-th of the chunks in an epoch, so in 4 * W of them all but one in e^4, which is 55.
_EPOCHS_OF_A_RANK = 4
_MAPPED_AT_ONCE = 2 << 20  # bytes, of rows that are copied from mapped files
# Of so many steps, or bytes, objects are made of what lies in mapped files: most of these are asked for each time.
_OBJECTS_AT_ONCE, _OBJECT_BYTES_AT_ONCE = 16, 16 << 20
# Each span touches most open chunks. Where three quarters of its rows stay there until they are copied, so many times
# more steps take no more memory; but all of them wait for the last chunk, so not where that is far away.
_LONGER_IN_CHUNKS = 4


class PlainAssembler:
    """Plans ahead, requests chunks ahead, and hands each gathered step to the pool. Used by the pipeline's thread."""

    def __init__(
        self,
        equipment: Equipment,
        start: Start,
        *,
        last_batch: str,
        quarantine: ReplacesChunks,
        selection: Selection | None = None,
        bucket_costs: SampleCosts | None = None,
    ) -> None:
        self._equipment = equipment
        self._source = equipment.source
        self._reader = equipment.reader
        self._maker = equipment.maker
        self._counters = equipment.counters
        self._order = start.order
        self._share = start.share
        self._epoch = start.epoch
        self._position = start.position
        self._last_batch = last_batch
        self._quarantine = quarantine
        self._selection = selection
        self._bucket_costs = bucket_costs
        self._next_uses: dict[int, int] | None = None
        self._next_uses_from = 0
        self._assembling: EpochSpans | None = None
        # Rows are copied on the pool's threads, where the chunks that they keep meanwhile are no matter to the budget.
        self._is_late = equipment.options.holds_windows and equipment.maker.workers is None
        self._copying: deque[_Copying] = deque()
        self._stay_in_chunks = False  # most rows of the last span

    def run(self) -> None:
        world_size = self._share.world_size
        epochs = 1 if world_size == 1 and self._selection is None else _EPOCHS_OF_A_RANK * world_size
        ahead = LookAhead(self._spans(), self._reader, epochs=epochs, is_short=self._equipment.is_short)
        for spans, span in ahead:
            if self._equipment.stopping.is_set() or not self._assemble_span(spans, span):
                return

    def fail(self, error: Exception) -> None:
        pass

    def waiting_for(self) -> dict[str, Any] | None:
        return None

    def _spans(self) -> Iterator[tuple[EpochSpans, Span | None]]:
        """Every span from here on, its windows not yet opened; span None marks an epoch's end."""
        manifest = self._source.manifest
        global_batch = self._share.global_batch_size
        at_once = 1  # so that the first batch does not wait for others
        rows = global_batch // self._share.world_size
        widened = 0 if self._is_late else self._widened_bytes()
        most = steps_at_once(self._equipment.options, rows, mean_row_bytes(manifest) + widened)
        while True:
            plan = plan_epoch(manifest.samples, self._order, self._epoch, self._selection, self._bucket_costs)
            spans = EpochSpans(plan, self._share, self._last_batch)
            while steps := spans.steps.ahead(self._position, at_once):
                span = spans.cut_span(self._position, steps)
                yield spans, span
                self._position = int(span.bounds[-1])
                longer = _LONGER_IN_CHUNKS if self._stay_in_chunks else 1
                at_once = min(longer * most, MOST_AT_ONCE, 2 * at_once)
            yield spans, None
            self._epoch, self._position = self._epoch + 1, 0

    def _widened_bytes(self) -> int:
        """How many bytes a row has more when it is handed out than it has in its chunk."""
        widened = 0
        for column in self._source.manifest.schema.get("columns", {}).values():
            if "shape" in column and column["type"] in WIDENED:
                stored = np.empty(0, column["type"])
                growth = self._maker.decoders.dtype_of(stored).itemsize - stored.itemsize
                widened += growth * math.prod(column["shape"])
        return widened

    def _assemble_span(self, spans: EpochSpans, span: Span | None) -> bool:
        if span is None:
            self._release_copied(_Copying(spans, spans.plan.num_samples))
            count = spans.plan.num_samples
            return self._equipment.deliver(Delivery.end_of(spans.plan.epoch, count, count))
        waited = self._counters.totals().chunk_wait_s
        started = time.perf_counter()
        rows: Rows | None = None
        apart: list[Span] = []
        try:
            rows = self._gather(spans, span)
        except Exception:
            apart = span.apart()
            if len(apart) == 1 or self._equipment.stopping.is_set():
                raise
        if rows is None:  # the batches before the one that needs what failed are delivered
            return all(self._assemble_span(spans, part) for part in apart)
        may_wait = self._source.is_local and self._equipment.options.has_spare
        self._stay_in_chunks = may_wait and rows.stay_in_chunks(self._maker.decoders.settled)
        busy = time.perf_counter() - started - (self._counters.totals().chunk_wait_s - waited)
        self._counters.add(since=started, assemble_s=busy, spans=1)
        copying = _Copying(spans, int(span.bounds[-1]))
        if not rows.keep_chunks:
            self._release_copied(copying)
        at_once = _copied_at_once(rows, span)
        firsts = range(0, span.steps, at_once)
        is_delivered = all(
            self._emit(span, range(first, min(first + at_once, span.steps)), rows, copying) for first in firsts
        )
        if rows.keep_chunks:
            self._release_copied(copying)
        return is_delivered

    def _gather(self, spans: EpochSpans, span: Span) -> Rows:
        groups = spans.expand(span)
        self._assembling, self._next_uses, self._next_uses_from = spans, None, int(span.bounds[-1])
        by_chunk = {group.chunk: group for group in groups}
        blocks = self._reader.take([group.chunk for group in groups])
        leases = self._equipment.leases
        return gather(
            (
                (by_chunk[chunk], loaded)
                if isinstance(loaded, Block)
                else self._quarantine.replace(by_chunk[chunk], loaded, span.epoch)
                for chunk, loaded in blocks
            ),
            span.num_rows,
            self._source.manifest.first_ids,
            self._maker.decoders,
            None if leases is None else leases.lend,
            memory=self._maker.memory if self._is_late else None,
        )

    def _release_copied(self, last: _Copying) -> None:
        """Let go of the chunks of spans whose rows are copied; ``last`` is the one that was assembled last.

        While the rows of one span are copied, the next one is assembled; of all before, the copies are waited for.
        """
        self._copying.append(last)
        while self._copying and (len(self._copying) > 1 or not self._copying[0].copies):
            copied = self._copying.popleft()
            wait(copied.copies)
            self._release(copied.spans, copied.position)

    def _release(self, spans: EpochSpans, position: int) -> None:
        done: list[int] = []
        for entered in spans.close_windows(position):
            done += entered.chunks.tolist()
        if done:
            self._reader.release(done)

    def _emit(self, span: Span, steps: range, rows: Rows, copying: _Copying) -> bool:
        started = time.perf_counter()
        parts = [cut_step(rows, span, step, self._share) for step in steps]
        batches, copied = self._maker.start_together(parts, span.epoch)
        if copied is not None:
            copying.copies.append(copied)
        for step, (batch_rows, _, num_valid), pending in zip(steps, parts, batches, strict=True):
            item = Delivery(
                epoch=span.epoch,
                start=int(span.bounds[step]),
                stop=int(span.bounds[step + 1]),
                ids=batch_rows.planned_ids[:num_valid],
                nbytes=batch_rows.count_bytes(self._maker.decoders.settled),
                batch=pending,
            )
            if not hand_over(self._equipment, item, started):
                return False
            started = time.perf_counter()
        return True

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """Positions at which resident chunks are next used, after the current span."""
        if self._next_uses is None:
            assert self._assembling is not None
            self._next_uses = self._assembling.next_uses(self._next_uses_from)
        return pick_uses(chunks, self._next_uses)


@dataclass(frozen=True, slots=True)
class _Copying:
    """A span, up to ``position``, and the ``copies`` of its batches' rows that its chunks are needed for."""

    spans: EpochSpans
    position: int
    copies: list[Future[None]] = field(default_factory=list)


def _copied_at_once(rows: Rows, span: Span) -> int:
    """Of how many steps rows are copied together: of mapped files several, since each copy asks for the files.

    Of wide rows as many as are copied by one call, so that threads seldom wait for Python's lock.
    """
    late = rows.late
    places = [each.at for each in late if each.at is not None]
    if any(isinstance(each, LateBytes) for each in late):
        most, most_bytes = _OBJECTS_AT_ONCE, _OBJECT_BYTES_AT_ONCE
    elif any(at.files for at in places):
        return max(1, _MAPPED_AT_ONCE * span.steps // sum(at.nbytes for at in places))
    elif late and all(isinstance(each, WideRows) for each in late):
        most, most_bytes = MOST_TOGETHER, TOGETHER_BYTES
    else:
        return 1
    return min(most, max(1, most_bytes * span.steps // max(1, sum(each.nbytes for each in late))))
