"""The assembler of a mixture: spans of all sources together, gathered by whole columns."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..columns import Block, IntArray
from ..decoding.gather import gather
from ..decoding.rows import Rows
from ..order.mixtures.spans import MixedSpan, MixedSpans, SourceOrder
from ..order.spans import ChunkRows
from ..pipeline.assembler import Equipment, Start, hand_over, pick_uses, steps_at_once
from ..pipeline.delivery_log import to_keys
from ..pipeline.delivery_queue import Delivery
from ..pipeline.tuning import mean_row_bytes
from ..sources.fields import check_fields
from ..sources.kinds import Kind
from ..sources.quarantine import MixedQuarantine
from ..sources.sources import Sources
from .batch import KindRows, start_batch
from .epochs import Place

_PLANNED_FOR_ONE, _MOST_PLANNED = 2, 256  # spans: planning one of many sources takes longer than of one


class MixtureAssembler:
    """Plans ahead, requests chunks ahead, and hands each gathered step to the pool. Used by the pipeline's thread."""

    def __init__(
        self,
        equipment: Equipment,
        start: Start,
        *,
        sources: Sources,
        kinds: Sequence[Kind],
        quarantine: MixedQuarantine,
        place: Callable[[], Place],
    ) -> None:
        self._equipment = equipment
        self._reader = equipment.reader
        self._counters = equipment.counters
        self._sources = sources
        self._kinds = kinds
        self._quarantine = quarantine
        self._place = place()
        self._spans = MixedSpans(self._place.plan, self._place.orders, start.share)
        self._rows = RowGatherer(sources, kinds, self._place.orders, quarantine)
        self._share = start.share
        self._gathering: MixedSpan | None = None
        self._next_uses: dict[int, int] | None = None

    def run(self) -> None:
        check_fields(self._sources, self._kinds, self._equipment.maker)
        for epoch, span in self._look_ahead():
            if self._equipment.stopping.is_set():
                return
            if span is None:
                if not self._equipment.deliver(Delivery.end_of(epoch, 0, 0)):
                    return
            elif not self._assemble(span):
                return

    def fail(self, error: Exception) -> None:
        pass

    def waiting_for(self) -> dict[str, Any] | None:
        return None

    def _look_ahead(self) -> Iterator[tuple[int, MixedSpan | None]]:
        planned: deque[tuple[int, MixedSpan | None]] = deque()
        source = self._plan()
        while True:
            for _ in range(_PLANNED_FOR_ONE):
                if planned and (len(planned) >= _MOST_PLANNED or not self._reader.has_room):
                    break
                epoch, span, chunks = next(source)
                self._reader.request(chunks)
                planned.append((epoch, span))
            yield planned.popleft()

    def _plan(self) -> Iterator[tuple[int, MixedSpan | None, list[int]]]:
        """Every span from here on, with the chunks that it is the first to need; None marks an epoch's end."""
        plan, place, size = self._place.plan, self._place, self._share.global_batch_size
        row_bytes = mean_row_bytes(self._sources.manifest)
        most = steps_at_once(self._equipment.options, size // self._share.world_size, row_bytes)
        epoch, start, consumed, here, at_once = place.epoch, place.start, place.consumed, place.here, 1
        while True:
            left = plan.steps_left(start, here)
            while left is None or left:
                steps = at_once if left is None else min(at_once, left)
                span, chunks = self._spans.plan_span(epoch, consumed, here, steps)
                yield epoch, span, chunks
                here = plan.advance(here, span.steps)
                consumed = int(span.bounds[-1])
                left = None if left is None else left - span.steps
                at_once = min(most, 2 * at_once)  # so that the first batch does not wait for others
            yield epoch, None, []
            epoch, start, consumed = epoch + 1, here, 0

    def _assemble(self, span: MixedSpan) -> bool:
        waited = self._counters.totals().chunk_wait_s
        started = time.perf_counter()
        rows: KindRows | None = None
        try:
            rows = self._gather(span)
        except Exception:
            # Of a share without rows every batch needs the one that shows its fields.
            if span.steps == 1 or not span.num_valid.any() or self._equipment.stopping.is_set():
                raise
        if rows is None:  # the batches before the one that needs what failed are delivered
            return all(self._assemble(span.cut(step)) for step in range(span.steps))
        busy = time.perf_counter() - started - (self._counters.totals().chunk_wait_s - waited)
        self._counters.add(since=started, assemble_s=busy, spans=1)
        done = self._spans.release(span)
        if done:
            self._reader.release(done)
        return all(self._emit(span, step, rows) for step in range(span.steps))

    def _gather(self, span: MixedSpan) -> KindRows:
        groups = self._spans.expand(span)
        self._gathering, self._next_uses = span, None
        leases = self._equipment.leases
        blocks = self._reader.take([group.chunk for group in groups])
        return self._rows.gather(span, groups, blocks, None if leases is None else leases.lend)

    def _emit(self, span: MixedSpan, step: int, rows: KindRows) -> bool:
        started = time.perf_counter()
        low, high = int(span.row_starts[step]), int(span.row_starts[step + 1])
        cut = rows.cut(low, high) if high > low else rows.first()  # which shows the fields of a batch without rows
        num_valid = int(span.num_valid[step])
        pending = start_batch(self._equipment.maker, self._kinds, cut, num_valid, num_valid)
        planned, epochs = cut.planned_ids[:num_valid], cut.epochs[:num_valid]
        logged = to_keys(planned, epochs)
        replaced = None
        if cut.are_replaced:
            pairs = np.stack([logged, to_keys(cut.ids[:num_valid], epochs)], axis=1)
            replaced = pairs[pairs[:, 0] != pairs[:, 1]]
        item = Delivery(
            epoch=span.epoch,
            start=int(span.bounds[step]),
            stop=int(span.bounds[step + 1]),
            ids=planned,
            nbytes=sum(
                rows.count_bytes(kind.decoders.settled) for kind, rows in zip(self._kinds, cut.rows, strict=True)
            ),
            batch=pending,
            logged=logged,
            replaced=replaced,
        )
        return hand_over(self._equipment, item, started)

    def next_use(self, chunks: Sequence[int]) -> dict[int, int]:
        """About when resident chunks are next used, after the current span."""
        if self._next_uses is None:
            assert self._gathering is not None
            self._next_uses = self._spans.next_uses(self._gathering)
        return pick_uses(chunks, self._next_uses)


class RowGatherer:
    """Gathers the rows of a span, apart by kind."""

    def __init__(
        self,
        sources: Sources,
        kinds: Sequence[Kind],
        orders: Sequence[SourceOrder],
        quarantine: MixedQuarantine,
    ) -> None:
        self._sources = sources
        self._kinds = kinds
        self._quarantine = quarantine
        self._seeds = np.array([source.order.seed for source in orders], np.uint64)
        self._kind_of = np.empty(len(sources), np.int64)
        for number, kind in enumerate(kinds):
            self._kind_of[list(kind.sources)] = number
        self._first_ids = sources.manifest.first_ids

    def gather(
        self,
        span: MixedSpan,
        groups: Sequence[ChunkRows],
        blocks: Iterator[tuple[int, Block | BaseException]],
        lend: Any = None,
    ) -> KindRows:
        """The rows of a span, whose chunks come from ``blocks`` in any order."""
        by_chunk = {group.chunk: group for group in groups}
        part_epochs = np.array([part.epoch for part in span.parts], np.int64)
        epochs = part_epochs[span.row_parts]
        loaded = (
            (by_chunk[chunk], block) if isinstance(block, Block) else self._quarantine.replace(by_chunk[chunk], block)
            for chunk, block in blocks
        )
        if len(self._kinds) == 1:
            rows = gather(loaded, span.num_rows, self._first_ids, self._kinds[0].decoders, lend)
            return KindRows((np.arange(span.num_rows),), (rows,), epochs, self._seeds, self._sources)
        part_kinds = self._kind_of[[part.source for part in span.parts]]
        row_kinds = part_kinds[span.row_parts]
        where = tuple(np.flatnonzero(row_kinds == kind) for kind in range(len(self._kinds)))
        return KindRows(where, tuple(self._gather_kinds(loaded, where, lend)), epochs, self._seeds, self._sources)

    def _gather_kinds(
        self, loaded: Iterator[tuple[ChunkRows, Block]], where: Sequence[IntArray], lend: Any
    ) -> Iterator[Rows]:
        """Each kind's rows. Blocks are held until their kind's turn: those of a span, which the reader holds too."""
        apart: list[list[tuple[ChunkRows, Block]]] = [[] for _ in self._kinds]
        for group, block in loaded:
            kind = int(self._kind_of[self._sources.of_chunk(group.chunk)[0]])
            targets = np.searchsorted(where[kind], group.targets)
            apart[kind].append((replace(group, targets=targets), block))
        for kind, of_kind in enumerate(apart):
            yield gather(of_kind, len(where[kind]), self._first_ids, self._kinds[kind].decoders, lend)
