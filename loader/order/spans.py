"""Spans: a few consecutive steps of one rank, planned together so that a chunk's rows are gathered at once.

Planning runs ahead of assembling. Planning a span opens the lane windows that it enters, which shows which chunks will
be needed, in order of first use; expanding a span shows which row of which chunk goes to which row of which batch.
Pure arithmetic over the plan; the open windows are the only state. Used by one thread, the assembler.

A run reads one data set, or several as one stream. Each epoch of each source has lanes and windows of its own. A step
takes from each lane of each its next samples, sorts all by (lane, source), and cuts that into the ranks' shares, so
that a rank keeps to its lanes in every source. Chunks have numbers in the joint space of all sources.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .cached import cached_property
from .costs.buckets import plan_epoch
from .costs.steps import plan_steps
from .plan import EpochPlan, Order, Segments, Share, column_segments, lane_offsets
from .window import Run, locate_runs

if TYPE_CHECKING:
    from .costs.costs import SampleCosts
    from .mixture import Cursor, MixturePlan
    from .permutation import IntArray
    from .selecting import Selection
    from .window import LaneWindow


@dataclass(frozen=True, kw_only=True)
class SourceOrder:
    """One source of a run: its chunks' samples, (chunks,) int64, its order, and its first chunk's joint number.

    ``selection`` and ``bucket_costs``: see ``plan_epoch``.
    """

    chunk_samples: IntArray
    order: Order
    first_chunk: int = 0
    selection: Selection | None = None
    bucket_costs: SampleCosts | None = None

    @cached_property
    def num_samples(self) -> int:
        """Samples of one of its epochs."""
        return int(self.chunk_samples.sum()) if self.selection is None else self.selection.num_samples

    def plan(self, epoch: int) -> EpochPlan:
        return plan_epoch(self.chunk_samples, self.order, epoch, self.selection, self.bucket_costs)


@dataclass(frozen=True, slots=True)
class Part:
    """Positions of one epoch of one source, (steps + 1,): where the next steps begin and end that take from it."""

    source: int
    epoch: int
    bounds: IntArray


@dataclass(frozen=True, slots=True)
class Taken:
    """Some consecutive steps of an epoch of a run: their ``bounds`` (steps + 1,) in its positions, and their parts.

    ``of_sources`` (2, sources): how many samples of each source's epochs, laid end to end, come before the first step,
    and how many before the end of the last. No steps: the epoch ends here.
    """

    epoch: int
    bounds: IntArray
    parts: tuple[Part, ...]
    of_sources: IntArray

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1


@dataclass(frozen=True, slots=True)
class Span:
    """Some consecutive steps: their ``bounds`` (steps + 1,) in positions, and this rank's segments of them.

    ``row_starts`` (steps + 1,): where each step's rows begin when all are laid end to end; ``num_valid`` (steps,): how
    many of a step's rows, from its first on, are the rank's share. ``taken`` says of which epochs of which sources the
    steps are; of n parts, the segments' ``lane`` is lane * n + part. A span that is planned within one epoch of one
    data set does without.
    """

    epoch: int
    bounds: IntArray
    segments: Segments
    row_starts: IntArray
    num_valid: IntArray
    taken: Taken | None = None

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    def cut(self, step: int, steps: int = 1) -> Span:
        """Cut out one step, or several."""
        stop = step + steps
        return Span(
            self.epoch,
            self.bounds[step : stop + 1],
            self.segments.of_steps(step, stop),
            self.row_starts[step : stop + 1] - self.row_starts[step],
            self.num_valid[step:stop],
            None if self.taken is None else _cut(self.taken, step, stop),
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        return () if self.taken is None else self.taken.parts

    def segments_of(self, part: int) -> Segments:
        """Those of one of the parts, by lane."""
        count = len(self.parts)
        return self.segments if count == 1 else pick_segments(self.segments, self.segments.lane % count == part, count)

    def of_rows(self, of_parts: IntArray) -> IntArray:
        """(rows,) int64: for each row, its part's value in ``of_parts`` (parts,)."""
        if len(of_parts) == 1:
            return np.broadcast_to(of_parts, (self.num_rows,))
        found: IntArray = np.repeat(
            of_parts[self.segments.lane % len(of_parts)], self.segments.stop - self.segments.start
        )
        return found

    def apart(self) -> list[Span]:
        """Split it into steps; one without rows, which borrows its fields, stays joined to one that has some."""
        has_rows = np.diff(self.row_starts) > 0
        starts = np.flatnonzero(has_rows).tolist()
        starts[:1] = [0]
        return [self.cut(low, high - low) for low, high in zip(starts, [*starts[1:], self.steps], strict=True)]


def _cut(taken: Taken, start: int, stop: int) -> Taken:
    parts = (replace(part, bounds=part.bounds[start : stop + 1]) for part in taken.parts)
    return replace(taken, bounds=taken.bounds[start : stop + 1], parts=tuple(parts))


def pick_segments(segments: Segments, chosen: np.ndarray[tuple[int, ...], np.dtype[np.bool_]], parts: int) -> Segments:
    """The chosen segments, whose columns (lane, part) become lanes."""
    return Segments(
        segments.step[chosen],
        segments.lane[chosen] // parts,
        segments.start[chosen],
        segments.stop[chosen],
        segments.slot[chosen],
    )


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows of one chunk and where they go: ``rows`` and ``targets`` are (n,) int64, targets in the span's rows.

    ``stands_for``: (n,) the ids of the samples that these replace, if they do.
    """

    chunk: int
    rows: IntArray
    targets: IntArray
    stands_for: IntArray | None = None


@dataclass(frozen=True, slots=True)
class EnteredWindow:
    """An open window, the chunks of it that are still needed, and the position at which each is first used."""

    window: LaneWindow
    chunks: IntArray
    first_uses: IntArray


class EpochSpans:
    """Plans one epoch's spans for one rank, from a position on; ``source`` is its data set's number in ``share``."""

    def __init__(self, plan: EpochPlan, share: Share, last_batch: str = "partial", source: int = 0) -> None:
        self.plan = plan
        self.share = share
        self.steps = plan_steps(plan, share, last_batch)
        self.costs: CostCuts | None = None  # by which global batches are cut
        if share.costs is not None:
            from .costs.walk import CostCuts

            self.costs = CostCuts(plan, share.costs[source])
        self._windows: dict[int, deque[EnteredWindow]] = {}
        self._opened_until = np.zeros(plan.order.lanes, np.int64)  # per lane: offset up to which windows are open

    def plan_span(self, first: int, steps: int) -> tuple[Span, list[EnteredWindow]]:
        """Plan ``steps`` steps from position ``first`` on; also returns the windows that they enter, now open."""
        span = self.cut_span(first, steps)
        return span, list(self.open_windows(span.segments))

    def cut_span(self, first: int, steps: int) -> Span:
        """Plan ``steps`` steps from position ``first`` on, whose windows the caller opens before expanding it."""
        bounds = self.steps.bounds(first, steps)
        offsets = lane_offsets(bounds, self.plan.turns)
        return cut_share(self.plan.epoch, bounds, offsets, self.cuts(bounds), self.share)

    def cuts(self, bounds: IntArray) -> IntArray:
        """Cut global batches with these bounds into shares: (steps, world_size + 1) int64."""
        if self.costs is None:
            return self.share.cuts(np.diff(bounds))
        return self.costs.of(bounds, self.share.world_size, self.share.weights)

    def open_windows(self, segments: Segments) -> Iterator[EnteredWindow]:
        """Open the windows that segments are the first to need, one by one: each takes a sort of its samples."""
        ahead = segments.stop > self._opened_until[segments.lane]
        for lane, start, stop in zip(
            segments.lane[ahead].tolist(), segments.start[ahead].tolist(), segments.stop[ahead].tolist(), strict=True
        ):
            if stop > self._opened_until[lane]:
                yield from self.enter(lane, start, stop)

    def enter(self, lane: int, start: int, stop: int) -> Iterator[EnteredWindow]:
        """Open the windows of a lane's offsets ``start`` to ``stop`` that are not open yet, one by one."""
        windows = self._windows.setdefault(lane, deque())
        index = windows[-1].window.index + 1 if windows else self.plan.window_at(lane, start)
        if not windows:  # they may have been open, and closed, before
            self._opened_until[lane] = min(int(self._opened_until[lane]), start)
        while self._opened_until[lane] < stop:
            window = self.plan.open_window(lane, index)
            self._opened_until[lane] = window.stop
            index += 1
            # A rank that owns a part of a lane may skip whole windows of it; those are never entered.
            if window.stop > start:
                windows.append(self._enter(window, max(window.start, start)))
                yield windows[-1]

    def _enter(self, window: LaneWindow, start: int) -> EnteredWindow:
        if self.plan.repeats_chunks:
            offsets = np.arange(start, window.stop, dtype=np.int64)
            pieces, _ = window.locate(offsets)
            chunks, uses = np.unique(self._narrow(window.chunks[pieces]), return_index=True)
            chunks, first = chunks.astype(np.int64), offsets[uses]
        else:
            first = window.first_uses(start)
            needed = first >= 0
            chunks, first = window.chunks[needed], first[needed]
        return EnteredWindow(window, chunks, first * self.plan.order.lanes + self.plan.turns[window.lane])

    def expand(self, span: Span) -> list[ChunkRows]:
        """List the rows of chunks that the span is made of, grouped by chunk, in order of first use."""
        segments = span.segments
        lengths = segments.stop - segments.start
        if not len(lengths):
            return []
        by_lane = np.argsort(segments.lane, kind="stable")
        lanes, starts, lengths = segments.lane[by_lane], segments.start[by_lane], lengths[by_lane]
        ends = np.cumsum(lengths)
        before = ends - lengths
        places = np.arange(int(ends[-1]), dtype=np.int64)
        targets = np.repeat((span.row_starts[segments.step] + segments.slot)[by_lane] - before, lengths) + places
        # A lane's offsets mostly continue from step to step: then they are a few runs, and no array.
        begins = np.append(True, (lanes[1:] != lanes[:-1]) | (starts[1:] != (starts + lengths)[:-1]))
        firsts = np.flatnonzero(begins)
        lows, highs = before[firsts], np.append(before[firsts[1:]], ends[-1])
        found: list[Run] = []
        starting: list[int] = []  # the place of the first of each
        for lane, offset, low, high in zip(
            lanes[firsts].tolist(), starts[firsts].tolist(), lows.tolist(), highs.tolist(), strict=True
        ):
            for run in self._cut_run(lane, offset, offset + high - low):
                found.append(run)
                starting.append(low + run.start - offset)
        names = [int(run.window.chunks[0]) for run in found if len(run.window.chunks) == 1]
        if len(set(names)) == len(found):  # each run is a chunk: nothing to sort
            rows = [run.window.locate_run(run.start, run.stop)[1] for run in found]
            return _list_runs(names, rows, targets, starting)
        return _group(*locate_runs(found), targets, self._narrow)

    def _cut_run(self, lane: int, start: int, stop: int) -> Iterator[Run]:
        """Cut offsets of a lane by the open windows that they lie in."""
        for window in (opened.window for opened in self._windows[lane]):
            end = min(stop, window.stop)
            if end > start:
                yield Run(window, start, end)
                start = end
            if start == stop:
                break

    def _narrow(self, chunks: IntArray) -> np.ndarray[tuple[int, ...], np.dtype[Any]]:
        """Numbers of chunks in a type that sorts fast: numpy sorts 16 bits by radix, several times faster than more."""
        few = len(self.plan.chunk_samples) <= np.iinfo(np.uint16).max
        return chunks.astype(np.uint16) if few else chunks

    def close_windows(self, position: int) -> Iterator[EnteredWindow]:
        """Close and yield the windows that lie wholly before a position: they are no longer needed."""
        return self.close_before(lane_offsets(np.array(position, np.int64), self.plan.turns))

    def close_before(self, offsets: IntArray) -> Iterator[EnteredWindow]:
        """Close and yield the windows that lie wholly before each lane's offset, (lanes,)."""
        for lane in list(self._windows):
            windows = self._windows[lane]
            while windows and windows[0].window.stop <= offsets[lane]:
                yield windows.popleft()
            if not windows:
                del self._windows[lane]

    def next_uses(self, position: int) -> dict[int, int]:
        """The position, from this one on, at which each chunk of the open windows is used next."""
        return self.next_uses_from(lane_offsets(np.array(position, np.int64), self.plan.turns))

    def next_uses_from(self, offsets: IntArray) -> dict[int, int]:
        """The position at which each chunk of the open windows is used next; lanes are at ``offsets``, (lanes,)."""
        uses: dict[int, int] = {}
        for lane, windows in self._windows.items():
            for window in (opened.window for opened in windows):
                entered = self._enter(window, max(window.start, int(offsets[lane])))
                for chunk, use in zip(entered.chunks.tolist(), entered.first_uses.tolist(), strict=True):
                    uses[chunk] = min(use, uses.get(chunk, use))
        return uses


def cut_share(
    epoch: int, bounds: IntArray, offsets: IntArray, cuts: IntArray, share: Share, taken: Taken | None = None
) -> Span:
    """A rank's share of steps that begin and end at ``bounds`` (steps + 1,), as ``cuts`` (steps, world_size + 1) say.

    ``offsets`` (steps + 1, columns): as of ``column_segments``. A rank without a row may borrow one; see ``Share``.
    """
    segments = column_segments(offsets, share.rank, share.world_size, cuts=cuts)
    num_valid = num_rows = cuts[:, share.rank + 1] - cuts[:, share.rank]
    if not num_valid[-1] and ((share.pad and share.batch_size) or not num_valid.any()):
        # As if there were as many ranks as samples: the first one's share is one sample.
        borrowed = column_segments(offsets[-2:], 0, int(bounds[-1] - bounds[-2]))
        segments = segments.join(borrowed, len(num_valid) - 1)
        num_rows = np.append(num_valid[:-1], 1)
    row_starts = np.zeros(len(bounds), np.int64)
    np.cumsum(num_rows, out=row_starts[1:])
    return Span(epoch, bounds, segments, row_starts, num_valid, taken)


class Course(Protocol):
    """Course of a run: the positions of sources' epochs that its next steps take."""

    def take(self, spans_of: Callable[[int, int], EpochSpans], most: int) -> Taken:
        """Take at most ``most`` steps of the epoch; none at its end, after which the next epoch begins.

        ``spans_of`` gives an epoch of a source.
        """


class SpanPlanner:
    """Plans the spans of a run for one rank. All sources have the same number of lanes."""

    def __init__(self, sources: Sequence[SourceOrder], share: Share, course: Course, last_batch: str) -> None:
        self._sources = sources
        self._share = share
        self._course = course
        self._last_batch = last_batch
        self._open: dict[tuple[int, int], EpochSpans] = {}

    def _spans_of(self, source: int, epoch: int) -> EpochSpans:
        if (source, epoch) not in self._open:
            plan = self._sources[source].plan(epoch)
            self._open[source, epoch] = EpochSpans(plan, self._share, self._last_batch, source)
        return self._open[source, epoch]

    def plan_next(self, most: int) -> Span:
        """Plan at most ``most`` steps of the epoch, whose windows the caller opens before expanding them.

        A span of no steps is an epoch's end.
        """
        taken = self._course.take(self._spans_of, most)
        bounds = taken.bounds
        if not taken.steps:
            none = np.empty(0, np.int64)
            return Span(taken.epoch, bounds, Segments(none, none, none, none, none), np.zeros(1, np.int64), none, taken)
        spans = [self._spans_of(part.source, part.epoch) for part in taken.parts]
        offsets = [lane_offsets(part.bounds, of.plan.turns) for part, of in zip(taken.parts, spans, strict=True)]
        if len(spans) == 1:
            return cut_share(taken.epoch, bounds, offsets[0], spans[0].cuts(taken.parts[0].bounds), self._share, taken)
        columns = np.stack(offsets, axis=-1).reshape(len(bounds), -1)
        return cut_share(taken.epoch, bounds, columns, self._cut(taken, spans, columns), self._share, taken)

    def _cut(self, taken: Taken, spans: Sequence[EpochSpans], columns: IntArray) -> IntArray:
        """Cut steps that take of several epochs into shares, as ``EpochSpans.cuts`` does those of one."""
        share, costs = self._share, [of.costs for of in spans if of.costs is not None]
        if not costs:
            return share.cuts(np.diff(taken.bounds))
        from .costs.walk import cut_together

        parts = [(own, part.bounds) for own, part in zip(costs, taken.parts, strict=True)]
        return cut_together(parts, columns, share.world_size, share.weights)

    def open_windows(self, span: Span) -> Iterator[EnteredWindow]:
        """Open the windows that a span is the first to need, one by one: each takes a sort of its samples.

        Their chunks have joint numbers; their first uses are positions of the run's epoch, about.
        """
        for number, part in enumerate(span.parts):
            for entered in self._spans_of(part.source, part.epoch).open_windows(span.segments_of(number)):
                yield self._join(entered, part, span)

    def _join(self, entered: EnteredWindow, part: Part, span: Span) -> EnteredWindow:
        if part.bounds is span.bounds:
            return entered
        assert span.taken is not None
        before, after = span.taken.of_sources[:, part.source]
        ahead = entered.first_uses + part.epoch * self._sources[part.source].num_samples - before
        rate = (after - before) / (span.taken.of_sources[1] - span.taken.of_sources[0]).sum()
        uses = int(span.bounds[0]) + (ahead / rate).astype(np.int64)
        return EnteredWindow(entered.window, entered.chunks + self._sources[part.source].first_chunk, uses)

    def expand(self, span: Span) -> list[ChunkRows]:
        """List the rows of chunks that the span is made of, grouped by joint chunk, in order of first use."""
        if len(self._sources) == len(span.parts) == 1:
            return self._spans_of(0, span.parts[0].epoch).expand(span)
        found: dict[int, list[ChunkRows]] = {}
        for number, part in enumerate(span.parts):
            own = replace(span, segments=span.segments_of(number))
            for group in self._spans_of(part.source, part.epoch).expand(own):
                found.setdefault(group.chunk + self._sources[part.source].first_chunk, []).append(group)
        groups = [_join_rows(chunk, together) for chunk, together in found.items()]
        groups.sort(key=lambda group: int(group.targets.min()))
        return groups

    def release(self, span: Span) -> list[int]:
        """Close the windows that end with the span, and return their chunks, once for each window."""
        done: list[int] = []
        for part in span.parts:
            position, source = int(part.bounds[-1]), self._sources[part.source]
            if (part.source, part.epoch) not in self._open:
                continue
            for entered in self._open[part.source, part.epoch].close_windows(position):
                done += (entered.chunks + source.first_chunk).tolist()
            if position == source.num_samples:
                del self._open[part.source, part.epoch]
        return done

    def next_uses(self, span: Span) -> dict[int, int]:
        """The position of the run's epoch, about, at which each chunk of the open windows is next used after a span."""
        assert span.taken is not None
        after = {(part.source, part.epoch): int(part.bounds[-1]) for part in span.parts}
        begin, end = span.taken.of_sources
        rates = np.maximum(1, end - begin) / (end - begin).sum()
        uses: dict[int, int] = {}
        for (number, epoch), spans in self._open.items():
            source, rate = self._sources[number], float(rates[number])
            before = epoch * source.num_samples - int(begin[number])
            for chunk, use in spans.next_uses(after.get((number, epoch), 0)).items():
                ahead = int(span.bounds[0]) + int((use + before) / rate)
                uses[source.first_chunk + chunk] = min(ahead, uses.get(source.first_chunk + chunk, ahead))
        return uses


def _join_rows(chunk: int, groups: Sequence[ChunkRows]) -> ChunkRows:
    if len(groups) == 1:
        return ChunkRows(chunk, groups[0].rows, groups[0].targets)
    rows, targets = (np.concatenate(arrays) for arrays in zip(*((g.rows, g.targets) for g in groups), strict=True))
    return ChunkRows(chunk, rows, targets)


def _list_runs(
    names: Sequence[int], rows: Sequence[IntArray], targets: IntArray, lows: Sequence[int]
) -> list[ChunkRows]:
    """Rows by their chunks, ``names``, in order of first use; those of a chunk have the targets from ``lows`` on."""
    by_use = np.argsort(np.minimum.reduceat(targets, lows), kind="stable").tolist()
    highs = [*lows[1:], len(targets)]
    return [ChunkRows(names[i], rows[i], targets[lows[i] : highs[i]]) for i in by_use]


def _group(
    chunks: IntArray,
    rows: IntArray,
    targets: IntArray,
    narrow: Callable[[IntArray], np.ndarray[tuple[int, ...], np.dtype[Any]]],
) -> list[ChunkRows]:
    """Rows by their chunks, in order of first use, of the chunk and row at each place."""
    by_chunk = np.argsort(narrow(chunks), kind="stable")
    chunks, rows, targets = chunks[by_chunk], rows[by_chunk], targets[by_chunk]
    starts = np.flatnonzero(np.diff(chunks, prepend=-1))
    first_uses = np.argsort(np.minimum.reduceat(targets, starts), kind="stable")
    stops = np.append(starts[1:], len(rows))
    return [
        ChunkRows(chunk, rows[low:high], targets[low:high])
        for chunk, low, high in zip(
            chunks[starts[first_uses]].tolist(), starts[first_uses].tolist(), stops[first_uses].tolist(), strict=True
        )
    ]


def chunks_by_first_use(entered: Sequence[EnteredWindow]) -> list[int]:
    """The chunks that windows need, in order of first use; one that lies in two windows appears twice."""
    if not entered:
        return []
    by_use = np.argsort(np.concatenate([window.first_uses for window in entered]), kind="stable")
    chunks: list[int] = np.concatenate([window.chunks for window in entered])[by_use].tolist()
    return chunks


_MOST_PARTS = 64  # epochs of sources in a span of several steps


class EpochCourse:
    """The course of one data set, from ``position`` of ``epoch`` on. Both are its mutable state."""

    def __init__(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position

    def take(self, spans_of: Callable[[int, int], EpochSpans], most: int) -> Taken:
        epoch, first, spans = self._epoch, self._position, spans_of(0, self._epoch)
        size = spans.plan.num_samples
        if steps := spans.steps.ahead(first, most):
            bounds = spans.steps.bounds(first, steps)
            self._position = int(bounds[-1])
        else:
            bounds = np.array([size], np.int64)
            self._epoch, self._position = epoch + 1, 0
        of_sources = epoch * size + bounds[[0, -1], None]
        return Taken(epoch, bounds, (Part(0, epoch, bounds),), of_sources)


class MixtureCourse:
    """The course of a mixture, from ``here`` on, in an epoch that began at ``start``. Both, and the epoch, change."""

    def __init__(self, plan: MixturePlan, epoch: int, start: Cursor, here: Cursor) -> None:
        self._plan = plan
        self._epoch = epoch
        self._start = start
        self._here = here
        self._left = plan.steps_left(start, here)

    def take(self, spans_of: Callable[[int, int], EpochSpans], most: int) -> Taken:
        plan, epoch, here = self._plan, self._epoch, self._here
        steps = most if self._left is None else min(most, self._left)
        if not steps:
            self._epoch, self._start, self._left = epoch + 1, here, plan.steps_left(here, here)
            taken = np.array([here.taken, here.taken], np.int64)
            return Taken(epoch, np.zeros(1, np.int64), (), taken)
        taken = plan.bounds(here, steps)
        while steps > 1 and self._count_parts(taken) > _MOST_PARTS:
            steps //= 2
            taken = taken[: steps + 1]
        first = here.position - self._start.position
        bounds = first + np.arange(steps + 1, dtype=np.int64) * plan.global_batch_size
        parts = tuple(part for source in range(plan.num_sources) for part in self._cut_epochs(source, taken[:, source]))
        self._here = plan.advance(here, steps)
        self._left = None if self._left is None else self._left - steps
        return Taken(epoch, bounds, parts, taken[[0, -1]])

    def _count_parts(self, taken: IntArray) -> int:
        sizes = np.array(self._plan.sizes, np.int64)
        used = taken[-1] > taken[0]
        return int(((taken[-1] - 1) // sizes - taken[0] // sizes + 1)[used].sum())

    def _cut_epochs(self, source: int, taken: IntArray) -> Iterator[Part]:
        """The epochs of a source that steps lie in."""
        size = self._plan.sizes[source]
        if taken[-1] > taken[0]:
            for epoch in range(int(taken[0]) // size, (int(taken[-1]) - 1) // size + 1):
                yield Part(source, epoch, np.clip(taken - epoch * size, 0, size))
