"""Spans: a few consecutive steps of one rank, planned together so that a chunk's rows are gathered at once.

Planning runs ahead of assembling. Planning a span opens the lane windows that it enters, which shows which chunks will
be needed, in order of first use; expanding a span shows which row of which chunk goes to which row of which batch.
Pure arithmetic over the plan; the open windows are the only state. Used by one thread, the assembler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .costs.steps import plan_steps
from .costs.walk import CostCuts
from .permutation import IntArray
from .plan import EpochPlan, Segments, Share, lane_offsets, rank_segments
from .window import LaneWindow


@dataclass(frozen=True, slots=True)
class Span:
    """Some consecutive steps: their ``bounds`` (steps + 1,) in positions, and this rank's segments of them.

    ``row_starts`` (steps + 1,): where each step's rows begin when all are laid end to end; ``num_valid`` (steps,): how
    many of a step's rows, from its first on, are the rank's share.
    """

    epoch: int
    bounds: IntArray
    segments: Segments
    row_starts: IntArray
    num_valid: IntArray

    @property
    def steps(self) -> int:
        return len(self.bounds) - 1

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    def cut(self, step: int, steps: int = 1) -> Span:
        """One step of it, or several."""
        stop = step + steps
        return Span(
            self.epoch,
            self.bounds[step : stop + 1],
            self.segments.of_steps(step, stop),
            self.row_starts[step : stop + 1] - self.row_starts[step],
            self.num_valid[step:stop],
        )

    def apart(self) -> list[Span]:
        """Its steps one by one; but one without rows, which borrows its fields, comes with one that has some."""
        has_rows = np.diff(self.row_starts) > 0
        starts = np.flatnonzero(has_rows).tolist()
        starts[:1] = [0]
        return [self.cut(low, high - low) for low, high in zip(starts, [*starts[1:], self.steps], strict=True)]


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Rows of one chunk and where they go: ``rows`` and ``targets`` are (n,) int64, targets in the span's rows.

    ``stands_for``: (n,) the ids of the samples that these take the place of, where that is so.
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
    """Plans one epoch's spans for one rank, from a position on."""

    def __init__(self, plan: EpochPlan, share: Share, last_batch: str = "partial") -> None:
        self.plan = plan
        self.share = share
        self.steps = plan_steps(plan, share, last_batch)
        self._cuts = None if share.costs is None else CostCuts(plan, share.costs)
        self._windows: dict[int, deque[EnteredWindow]] = {}
        self._opened_until = np.zeros(plan.order.lanes, np.int64)  # per lane: offset up to which windows are open

    def plan_span(self, first: int, steps: int) -> tuple[Span, list[EnteredWindow]]:
        """Plan ``steps`` steps from position ``first`` on; also returns the windows that they enter, now open."""
        span = self.cut_span(first, steps)
        return span, list(self.open_windows(span.segments))

    def cut_span(self, first: int, steps: int) -> Span:
        """Plan ``steps`` steps from position ``first`` on, whose windows the caller opens before expanding it."""
        share = self.share
        bounds = self.steps.bounds(first, steps)
        if self._cuts is None:
            cuts = share.cuts(np.diff(bounds))
        else:
            cuts = self._cuts.of(bounds, share.world_size, share.weights)
        segments = rank_segments(bounds, self.plan.turns, share.rank, share.world_size, cuts=cuts)
        num_valid = cuts[:, share.rank + 1] - cuts[:, share.rank]
        num_rows = num_valid
        if not num_valid[-1] and ((share.pad and share.batch_size) or not num_valid.any()):
            # As if there were as many ranks as samples: the first one's share is one sample.
            borrowed = rank_segments(bounds[-2:], self.plan.turns, 0, int(bounds[-1] - bounds[-2]))
            segments = segments.join(borrowed, steps - 1)
            num_rows = np.append(num_valid[:-1], 1)
        row_starts = np.zeros(steps + 1, np.int64)
        np.cumsum(num_rows, out=row_starts[1:])
        return Span(self.plan.epoch, bounds, segments, row_starts, num_valid)

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
        """Which rows of which chunks the span is made of, grouped by chunk, in order of first use."""
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
        # A lane's offsets mostly go on from step to step: then they are a few runs, and no array.
        begins = np.append(True, (lanes[1:] != lanes[:-1]) | (starts[1:] != (starts + lengths)[:-1]))
        firsts = np.flatnonzero(begins)
        lows, highs = before[firsts], np.append(before[firsts[1:]], ends[-1])
        found: list[tuple[int, IntArray | int, IntArray]] = []  # the place of the first, chunks, rows
        for lane, offset, low, high in zip(
            lanes[firsts].tolist(), starts[firsts].tolist(), lows.tolist(), highs.tolist(), strict=True
        ):
            found += self._locate(lane, offset, low, high)
        return _group(found, targets, self._narrow)

    def _locate(self, lane: int, offset: int, low: int, high: int) -> Iterator[tuple[int, IntArray | int, IntArray]]:
        """Chunks and rows of a lane's offsets from ``offset`` on, at the places ``low`` to ``high``, by window."""
        for window in (opened.window for opened in self._windows[lane]):
            stop = min(high, low + window.stop - offset)
            if stop > low:
                pieces, rows = window.locate_run(offset, offset + stop - low)
                yield low, int(window.chunks[0]) if pieces is None else window.chunks[pieces], rows
                offset, low = offset + stop - low, stop
            if low == high:
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
        """At which position, from this one on, each chunk of the open windows is used next."""
        return self.next_uses_from(lane_offsets(np.array(position, np.int64), self.plan.turns))

    def next_uses_from(self, offsets: IntArray) -> dict[int, int]:
        """At which position each chunk of the open windows is used next, where lanes are at ``offsets``, (lanes,)."""
        uses: dict[int, int] = {}
        for lane, windows in self._windows.items():
            for window in (opened.window for opened in windows):
                entered = self._enter(window, max(window.start, int(offsets[lane])))
                for chunk, use in zip(entered.chunks.tolist(), entered.first_uses.tolist(), strict=True):
                    uses[chunk] = min(use, uses.get(chunk, use))
        return uses


def _group(
    found: Sequence[tuple[int, IntArray | int, IntArray]],
    targets: IntArray,
    narrow: Callable[[IntArray], np.ndarray[tuple[int, ...], np.dtype[Any]]],
) -> list[ChunkRows]:
    """Rows by their chunks, in order of first use: of runs of places the chunk, or each place's, and each row."""
    names = [chunk for _, chunk, _ in found if isinstance(chunk, int)]
    if len(set(names)) == len(found):  # each run is a chunk: nothing to sort
        lows = [low for low, _, _ in found]
        by_use = np.argsort(np.minimum.reduceat(targets, lows), kind="stable").tolist()
        highs = [*lows[1:], len(targets)]
        return [ChunkRows(names[i], found[i][2], targets[lows[i] : highs[i]]) for i in by_use]
    rows = np.concatenate([of_run for _, _, of_run in found])
    chunks = np.concatenate([np.broadcast_to(chunk, len(of_run)) for _, chunk, of_run in found])
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
