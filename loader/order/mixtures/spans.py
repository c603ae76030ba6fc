"""Spans of a mixture: a few consecutive steps of one rank, of all sources together.

Each epoch of each source has lanes and windows of its own. A step takes from each lane of each source its next samples,
sorts all by (lane, source) and cuts that into the ranks' shares, so that a rank keeps to its lanes in every source.
Chunks have numbers in the joint space of all sources. Used by one thread, the assembler.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..permutation import IntArray
from ..plan import EpochPlan, Order, Segments, Share, column_segments, lane_offsets, lane_turns, share_bounds
from ..selecting.selection import Selection
from ..spans import ChunkRows, EnteredWindow, EpochSpans, Span
from .mixture import Cursor, MixturePlan

_MOST_PARTS = 64  # epochs of sources in a span of several steps


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """One source of a mixture: its chunks' samples, (chunks,) int64, its order, and its first chunk's joint number."""

    chunk_samples: IntArray
    order: Order
    first_chunk: int
    selection: Selection | None = None

    @property
    def num_samples(self) -> int:
        """Samples of one of its epochs."""
        return int(self.chunk_samples.sum()) if self.selection is None else self.selection.num_samples


@dataclass(frozen=True, slots=True)
class Part:
    """What a span has of one epoch of one source: a span of that epoch, whose rows lie among those of all."""

    source: int
    epoch: int
    span: Span


@dataclass(frozen=True, slots=True)
class MixedSpan:
    """Some steps of an epoch of a mixture: their ``bounds`` (steps + 1,) in its positions, and the parts of these.

    ``row_starts`` and ``num_valid`` are those of a ``Span``; ``row_parts`` (rows,) is the part of each row. ``begin``
    is the run's cursor before the first step.
    """

    epoch: int
    begin: Cursor
    bounds: IntArray
    row_starts: IntArray
    num_valid: IntArray
    row_parts: IntArray
    parts: tuple[Part, ...]

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    def cut(self, step: int) -> MixedSpan:
        """One step of it."""
        rows = slice(int(self.row_starts[step]), int(self.row_starts[step + 1]))
        return MixedSpan(
            self.epoch,
            self.begin,
            self.bounds[step : step + 2],
            self.row_starts[step : step + 2] - self.row_starts[step],
            self.num_valid[step : step + 1],
            self.row_parts[rows],
            tuple(Part(part.source, part.epoch, part.span.cut(step)) for part in self.parts),
        )


class MixedSpans:
    """Plans the spans of a run for one rank, from a cursor on. All sources have the same number of lanes."""

    def __init__(self, plan: MixturePlan, sources: Sequence[SourceOrder], share: Share) -> None:
        self.plan = plan
        self.sources = sources
        self._share = share
        self._lanes = sources[0].order.lanes
        self._turns = lane_turns(self._lanes)
        self._open: dict[tuple[int, int], EpochSpans] = {}

    def plan_span(self, epoch: int, consumed: int, begin: Cursor, steps: int) -> tuple[MixedSpan, list[int]]:
        """Plan up to ``steps`` steps from a cursor on, at ``consumed`` of a mixture's epoch.

        Also returns the chunks that they are the first to need, in order of first use, once for each window.
        """
        taken = self.plan.bounds(begin, steps)
        while steps > 1 and self._count_parts(taken) > _MOST_PARTS:
            steps //= 2
            taken = taken[: steps + 1]
        pieces = [piece for source in range(len(self.sources)) for piece in self._cut_epochs(source, taken[:, source])]
        offsets = np.stack([lane_offsets(bounds, self._turns) for _, _, bounds in pieces], axis=-1)
        share, size = self._share, self._share.global_batch_size
        columns = offsets.reshape(steps + 1, -1)
        cuts = share_bounds(np.full(steps, size), share.world_size, share.weights)
        segments = column_segments(columns, share.rank, share.world_size, cuts=cuts)
        num_valid = num_rows = cuts[:, share.rank + 1] - cuts[:, share.rank]
        if not num_valid.any():  # borrow one row, to know which fields a batch has
            segments = segments.join(column_segments(columns[-2:], 0, size), steps - 1)
            num_rows = np.append(num_valid[:-1], 1)
        row_starts = np.zeros(steps + 1, np.int64)
        np.cumsum(num_rows, out=row_starts[1:])
        part_of = segments.lane % len(pieces)
        parts, chunks, uses = [], [], []
        for number, (source, source_epoch, bounds) in enumerate(pieces):
            own = pick_segments(segments, part_of == number, len(pieces))
            part = Part(source, source_epoch, Span(source_epoch, bounds, own, row_starts, num_valid))
            parts.append(part)
            entered = self._spans_of(source, source_epoch).open_windows(own)
            for window in entered:
                chunks.append(window.chunks + self.sources[source].first_chunk)
                uses.append(self._run_positions(part, window, begin, taken))
        bounds = consumed + np.arange(steps + 1, dtype=np.int64) * size
        row_parts = np.repeat(part_of, segments.stop - segments.start)
        span = MixedSpan(epoch, begin, bounds, row_starts, num_valid, row_parts, tuple(parts))
        if not chunks:
            return span, []
        by_use = np.argsort(np.concatenate(uses), kind="stable")
        return span, np.concatenate(chunks)[by_use].tolist()

    def _count_parts(self, taken: IntArray) -> int:
        sizes = np.array(self.plan.sizes, np.int64)
        used = taken[-1] > taken[0]
        return int(((taken[-1] - 1) // sizes - taken[0] // sizes + 1)[used].sum())

    def _cut_epochs(self, source: int, taken: IntArray) -> Iterator[tuple[int, int, IntArray]]:
        """The epochs of a source that steps lie in: (source, its epoch, (steps + 1,) positions in that)."""
        size = self.plan.sizes[source]
        if taken[-1] > taken[0]:
            for epoch in range(int(taken[0]) // size, (int(taken[-1]) - 1) // size + 1):
                yield source, epoch, np.clip(taken - epoch * size, 0, size)

    def _spans_of(self, source: int, epoch: int) -> EpochSpans:
        if (source, epoch) not in self._open:
            of_source = self.sources[source]
            plan = EpochPlan(of_source.chunk_samples, of_source.order, epoch, of_source.selection)
            self._open[source, epoch] = EpochSpans(plan, self._share)
        return self._open[source, epoch]

    def _run_positions(self, part: Part, entered: EnteredWindow, begin: Cursor, taken: IntArray) -> IntArray:
        """About when a window's chunks are first used, in samples of the run."""
        ahead = entered.first_uses + part.epoch * self.plan.sizes[part.source] - taken[0, part.source]
        rate = (taken[-1, part.source] - taken[0, part.source]) / (taken[-1] - taken[0]).sum()
        positions: IntArray = begin.position + (ahead / rate).astype(np.int64)
        return positions

    def expand(self, span: MixedSpan) -> list[ChunkRows]:
        """Which rows of which chunks the span is made of, grouped by joint chunk, in order of first use."""
        found: dict[int, list[ChunkRows]] = {}
        for part in span.parts:
            for group in self._spans_of(part.source, part.epoch).expand(part.span):
                found.setdefault(group.chunk + self.sources[part.source].first_chunk, []).append(group)
        groups = [_join(chunk, together) for chunk, together in found.items()]
        groups.sort(key=lambda group: int(group.targets.min()))
        return groups

    def release(self, span: MixedSpan) -> list[int]:
        """Close the windows that end with the span, and return their chunks, once for each window."""
        done: list[int] = []
        for part in span.parts:
            position, first = int(part.span.bounds[-1]), self.sources[part.source].first_chunk
            for entered in self._spans_of(part.source, part.epoch).close_windows(position):
                done += (entered.chunks + first).tolist()
            if position == self.plan.sizes[part.source]:
                del self._open[part.source, part.epoch]
        return done

    def next_uses(self, span: MixedSpan) -> dict[int, int]:
        """About when, after a span, each chunk of the open windows is used next, in samples of the run."""
        after = {(part.source, part.epoch): int(part.span.bounds[-1]) for part in span.parts}
        taken = self.plan.bounds(span.begin, span.steps)
        size = span.steps * self._share.global_batch_size
        uses: dict[int, int] = {}
        for (source, epoch), spans in self._open.items():
            rate = max(1, int(taken[-1, source] - taken[0, source])) / size
            first = self.sources[source].first_chunk
            for chunk, use in spans.next_uses(after.get((source, epoch), 0)).items():
                ahead = (use + epoch * self.plan.sizes[source] - int(taken[0, source])) / rate
                uses[first + chunk] = min(int(ahead), uses.get(first + chunk, int(ahead)))
        return uses


def pick_segments(segments: Segments, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], parts: int) -> Segments:
    """The chosen segments, whose columns (lane, part) become lanes."""
    return Segments(
        segments.step[chosen],
        segments.lane[chosen] // parts,
        segments.start[chosen],
        segments.stop[chosen],
        segments.slot[chosen],
    )


def _join(chunk: int, groups: Sequence[ChunkRows]) -> ChunkRows:
    if len(groups) == 1:
        return ChunkRows(chunk, groups[0].rows, groups[0].targets)
    rows, targets = (np.concatenate(arrays) for arrays in zip(*((g.rows, g.targets) for g in groups), strict=True))
    return ChunkRows(chunk, rows, targets)
