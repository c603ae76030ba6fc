"""The assembler of arithmetic orders: every sample is delivered, gathered by whole columns, a span at a time."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from ..columns import Block
from ..order.spans import ChunkRows, Span, SpanPlanner
from ..pipeline.assembler import (
    MOST_AT_ONCE,
    Equipment,
    Start,
    cut_step,
    gather_apart,
    hand_over,
    pick_uses,
    steps_at_once,
    time_assembly,
)
from ..pipeline.delivery_log import to_keys
from ..pipeline.delivery_queue import Delivery
from ..pipeline.tuning import mean_row_bytes
from .kind_rows import AnyRows, RowKinds
from .look_ahead import Ahead, LookAhead

if TYPE_CHECKING:
    from ..reading.bad.chunks import ReplacesChunks
    from ..sampler.sampler import Sampler
    from ..sources.kinds import Kind
    from ..sources.sources import Sources

# Each span touches most open chunks. Where three quarters of its rows stay there until they are copied, so many times
# more steps take no more memory; but all of them wait for the last chunk, so not where that is far away.
_LONGER_IN_CHUNKS = 4


class SpanAssembler:
    """Plans ahead, requests chunks ahead, and hands each gathered step to the pool. Used by the pipeline's thread."""

    def __init__(
        self,
        equipment: Equipment,
        start: Start,
        *,
        sampler: Sampler,
        sources: Sources,
        kinds: Sequence[Kind],
        last_batch: str,
        quarantine: ReplacesChunks,
    ) -> None:
        self._equipment = equipment
        self._reader = equipment.reader
        self._counters = equipment.counters
        self._sources = sources
        self._kinds = kinds
        self._share = start.share
        self._quarantine = quarantine
        course = sampler.course(start.epoch, start.position)
        self._planner = SpanPlanner(sampler.orders, start.share, course, last_batch)
        self._rows = RowKinds(sources, kinds, sampler.orders, equipment.maker)
        self._gathering: Span | None = None
        self._next_uses: dict[int, int] | None = None
        # Rows are copied on the pool's threads, where the chunks that they keep meanwhile are no matter to the budget.
        self._is_late = equipment.options.holds_windows and equipment.maker.workers is None
        self._copying: deque[_Copying] = deque()
        self._stay_in_chunks = False  # most rows of the last span

    def run(self) -> None:
        from ..sources.fields import check_fields

        check_fields(self._sources, self._kinds, self._equipment.maker)
        is_selected = any(source.selection is not None for source in self._sources)
        ahead = Ahead.of(len(self._sources), self._share.world_size, is_selected=is_selected)
        is_short = self._equipment.is_short
        for span in LookAhead(self._planner, self._plan(), self._reader, ahead, is_short=is_short):
            if self._equipment.stopping.is_set() or not self._assemble(span):
                return

    def fail(self, error: Exception) -> None:
        pass

    def waiting_for(self) -> dict[str, Any] | None:
        return None

    def _plan(self) -> Iterator[Span]:
        """Plan every span from here on, with unopened windows; one of no steps is an epoch's end."""
        rows = self._share.global_batch_size // self._share.world_size
        widened = 0 if self._is_late else self._rows.widened_bytes()
        most = steps_at_once(self._equipment.options, rows, mean_row_bytes(self._sources.manifest) + widened)
        at_once = 1  # so that the first batch does not wait for others
        while True:
            span = self._planner.plan_next(at_once)
            yield span
            if span.steps:
                longer = _LONGER_IN_CHUNKS if self._stay_in_chunks else 1
                at_once = min(longer * most, MOST_AT_ONCE, 2 * longer * at_once)

    def _assemble(self, span: Span) -> bool:
        if not span.steps:
            self._release_copied(_Copying(span))
            end = int(span.bounds[-1])
            return self._equipment.deliver(Delivery.end_of(span.epoch, end, end))
        apart = gather_apart(span, self._gather, Span.apart, self._equipment.stopping)
        return all(self._hand_out(part, rows) for part, rows in apart)

    def _hand_out(self, span: Span, rows: AnyRows) -> bool:
        may_wait = self._sources.is_local and self._equipment.options.has_spare
        self._stay_in_chunks = may_wait and self._rows.stay_in_chunks(rows)
        copying, keeps_chunks = _Copying(span), self._rows.keeps_chunks(rows)
        if not keeps_chunks:
            self._release_copied(copying)
        at_once = self._rows.count_together(rows, span.steps)
        firsts = range(0, span.steps, at_once)
        is_delivered = all(
            self._emit(span, range(first, min(first + at_once, span.steps)), rows, copying) for first in firsts
        )
        if keeps_chunks:
            self._release_copied(copying)
        return is_delivered

    def _gather(self, span: Span) -> AnyRows:
        with time_assembly(self._counters, spans=1):
            groups = {group.chunk: group for group in self._planner.expand(span)}
            self._gathering, self._next_uses = span, None
            leases = self._equipment.leases
            return self._rows.gather(
                span,
                self._take(span, groups),
                None if leases is None else leases.lend,
                self._equipment.maker.memory if self._is_late else None,
            )

    def _take(self, span: Span, groups: dict[int, ChunkRows]) -> Iterator[tuple[ChunkRows, Block]]:
        for chunk, loaded in self._reader.take([*groups]):
            if isinstance(loaded, Block):
                yield groups[chunk], loaded
            else:
                epochs = span.of_rows(np.array([part.epoch for part in span.parts]))
                yield self._quarantine.replace(groups[chunk], loaded, epochs[groups[chunk].targets])

    def _release_copied(self, last: _Copying) -> None:
        """Release the chunks of spans whose rows are copied; ``last`` is the one that was assembled last.

        While the rows of one span are copied, the next one is assembled; of all before, the copies are waited for.
        """
        self._copying.append(last)
        while self._copying and (len(self._copying) > 1 or not self._copying[0].copies):
            copied = self._copying.popleft()
            wait(copied.copies)
            if done := self._planner.release(copied.span):
                self._reader.release(done)

    def _emit(self, span: Span, steps: range, rows: AnyRows, copying: _Copying) -> bool:
        started = time.perf_counter()
        parts = [cut_step(rows, span, step, self._share) for step in steps]
        batches, copied = self._rows.start(parts, span.epoch)
        copying.copies.extend(copied)
        for step, (batch_rows, _, num_valid), pending in zip(steps, parts, batches, strict=True):
            planned = batch_rows.ids if batch_rows.planned is None else batch_rows.planned
            logged = None
            if self._sources.is_mixed:
                assert batch_rows.epochs is not None
                logged = to_keys(planned[:num_valid], batch_rows.epochs[:num_valid])
            item = Delivery(
                epoch=span.epoch,
                start=int(span.bounds[step]),
                stop=int(span.bounds[step + 1]),
                ids=planned[:num_valid],
                nbytes=self._rows.count_bytes(batch_rows),
                batch=pending,
                logged=logged,
            )
            if not hand_over(self._equipment, item, started):
                return False
            started = time.perf_counter()
        return True

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """Estimate the next uses of resident chunks, after the current span, in positions of its epoch."""
        if self._next_uses is None:
            assert self._gathering is not None
            self._next_uses = self._planner.next_uses(self._gathering)
        return pick_uses(chunks, self._next_uses)


@dataclass(frozen=True, slots=True)
class _Copying:
    """A span whose chunks are needed for the ``copies`` of its batches' rows."""

    span: Span
    copies: list[Future[None]] = field(default_factory=list)
