"""The lanes of one rank in one epoch: reads their windows ahead and keeps work going on them, round by round."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..columns import IntArray
from ..errors import ConfigError, LoaderClosedError
from ..order.plan import EpochPlan, Segments, Share, lane_sizes
from ..order.spans import ChunkRows, EnteredWindow, EpochSpans, Span
from ..pipeline.assembler import Equipment
from ..ranks.ledger import EpochLedger
from .feed import LaneFeed
from .work import PendingYield, WindowWork, Yield

_ROUNDS = 3  # that are worked on at once: while one is waited for, the threads have the next
_MARGIN = 1.1  # what is asked for beyond the expected need
_AHEAD_AT_ONCE = 8
_MOST_ROWS = 1 << 16
_SHOWN_IDS = 8

Range = tuple[int, int, int]  # lane, first input, one past the last


@dataclass(frozen=True, slots=True)
class _Round:
    ranges: Sequence[Range]
    pending: PendingYield


@dataclass(frozen=True, slots=True)
class _Failed:
    """What reading an input raised, in its place in the order."""

    error: Exception

    @property
    def ids(self) -> IntArray:
        return np.empty(0, np.int64)

    def result(self) -> Yield:
        none = np.empty(0, np.int64)
        return Yield(none, none, none, none, (), failed=self.error)

    def cancel(self) -> None:
        pass


class LaneFeeds:
    """Some lanes of an epoch, of which outputs are wanted. Used by the assembler thread alone.

    ``spacing``: every how many inputs of a lane work may begin again; what is found there is told to ``ledger``.
    """

    def __init__(
        self,
        plan: EpochPlan,
        share: Share,
        work: WindowWork,
        equipment: Equipment,
        *,
        spacing: int,
        round_rows: int,
        ledger: EpochLedger | None,
    ) -> None:
        self.feeds: dict[int, LaneFeed] = {}
        self._spans = EpochSpans(plan, share)
        self._plan = plan
        self._work = work
        self._reader = equipment.reader
        self._stopping = equipment.stopping
        self._spacing = spacing
        self._round_rows = min(round_rows, _MOST_ROWS)
        self._ledger = ledger
        self._sizes = lane_sizes(plan.num_samples, plan.order.lanes)
        self._opened: dict[int, int] = {}
        self._rounds: deque[_Round] = deque()
        self.waiting: tuple[str, float] | None = None  # what is waited for, since this perf_counter()
        self._horizon = 0.0  # outputs a lane, beyond those found, whose inputs have been requested

    def add(self, lane: int, offset: int, outputs: int, base: int = 0) -> LaneFeed:
        """Begin with a lane at an input, before which it has ``outputs`` outputs; again, if it has begun before it.

        ``base``: see ``LaneFeed``.
        """
        if lane in self.feeds:
            self._abandon()
        feed = LaneFeed(lane, offset, outputs, int(self._sizes[lane]), base)
        self.feeds[lane] = feed
        self._opened[lane] = offset
        if self._ledger is not None and feed.is_over:
            self._ledger.note(lane, (), outputs, is_end=True)
        return feed

    def drop(self, lane: int) -> None:
        """Let go of a lane for good."""
        self._abandon()
        del self.feeds[lane]

    # -- work -----------------------------------------------------------------------------------------------------

    def reach(self, targets: Mapping[int, int], ahead: Mapping[int, int]) -> None:
        """Work until each lane has as many outputs as its target says, has ended, or has failed; go on to ``ahead``."""
        while True:
            while len(self._rounds) < _ROUNDS and (self._begin(targets) or self._begin(ahead)):
                self.look_ahead()
            if not any(
                self.feeds[lane].found < most and not self.feeds[lane].is_over for lane, most in targets.items()
            ):
                return
            if self._stopping.is_set() or not self._rounds:
                assert self._stopping.is_set()
                return
            self._settle(self._rounds.popleft())

    def _begin(self, targets: Mapping[int, int]) -> bool:
        """Begin a round towards the targets, as large as is expected to be needed; whether there is any."""
        wanted: dict[int, float] = {}
        usual = self._usual_rate()
        for lane, most in targets.items():
            feed = self.feeds[lane]
            if feed.asked == feed.size or feed.failed is not None:
                continue
            rate = self._rate(feed, usual)
            lacking = most - feed.found - (feed.asked - feed.done) * rate
            if lacking > 0:
                wanted[lane] = min(lacking / rate * _MARGIN + 1, feed.size - feed.asked)
        if not wanted:
            return False
        unit = self._work.unit
        shrink = min(1.0, self._round_rows / sum(wanted.values()))
        if unit > 1:  # lanes that are behind come first, and wait for no others
            wanted = dict(sorted(wanted.items(), key=lambda each: self.feeds[each[0]].found))
        ranges: list[Range] = []
        for lane, count in wanted.items():
            if unit > 1 and sum(stop - start for _, start, stop in ranges) >= self._round_rows:
                break
            feed = self.feeds[lane]
            stop = min(feed.size, feed.asked + self._whole(max(1, math.ceil(count * shrink))))
            ranges.append((lane, feed.asked, stop))
        self._start(ranges)
        return True

    def _start(self, ranges: Sequence[Range]) -> bool:
        """Open the windows of a round, and start it; False where reading failed, which its lane then tells in turn."""
        try:
            pending = self._work.start(*self._read(ranges), self._plan.epoch)
        except ConfigError:
            raise  # it is not about one of the samples
        except Exception as exc:
            if self._stopping.is_set():
                raise
            if len(ranges) > 1:
                started = [self._start([each]) for each in ranges]
                return all(started)
            lane, start, stop = ranges[0]
            if stop - start > self._work.unit:  # what comes before the input that fails can be used
                middle = start + self._whole((stop - start) // 2)
                return self._start([(lane, start, middle)]) and self._start([(lane, middle, stop)])
            self._rounds.append(_Round(ranges, _Failed(exc)))
            self.feeds[lane].asked = stop
            return False
        self._rounds.append(_Round(ranges, pending))
        for lane, _, stop in ranges:
            self.feeds[lane].asked = stop
        return True

    def _whole(self, inputs: int) -> int:
        """So many inputs, or the next number of whole units."""
        return -(-inputs // self._work.unit) * self._work.unit

    def _read(self, ranges: Sequence[Range]) -> tuple[list[ChunkRows], IntArray]:
        entered: list[EnteredWindow] = []
        for lane, start, stop in ranges:
            entered += self._open(lane, start, stop)
        self._request(entered)
        lane, start, stop = np.array(ranges, np.int64).T
        slot = np.cumsum(stop - start) - (stop - start)
        count = int((stop - start).sum())
        bounds = np.array([0, count])
        segments = Segments(np.zeros(len(lane), np.int64), lane, start, stop, slot)
        span = Span(self._plan.epoch, bounds, segments, bounds, np.array([count]))
        return self._spans.expand(span), np.append(slot, count)

    def _settle(self, done: _Round) -> None:
        """Wait for a round, and give each lane what is its own."""
        shown = ", ".join(map(str, done.pending.ids[:_SHOWN_IDS].tolist()))
        more = ", ..." if len(done.pending.ids) > _SHOWN_IDS else ""
        what = f"decoding and transforming samples {shown}{more} of epoch {self._plan.epoch}"
        self.waiting = what, time.perf_counter()
        try:
            found = done.pending.result()
        finally:
            self.waiting = None
        slot = 0
        for lane, start, stop in done.ranges:
            reached = min(stop - start, len(found.ids) - slot)
            if reached or not found.failed:
                self._give(self.feeds[lane], cut_yield(found, slot, slot + reached))
            slot += reached
            if reached < stop - start:
                break
        if found.failed is not None:
            if self._stopping.is_set():  # then what was under way may fail, and other ranks must not hear of it
                raise LoaderClosedError("the loader was closed while it worked on samples") from found.failed
            self.feeds[lane].failed = found.failed
            self._abandon()

    def _abandon(self) -> None:
        """Forget the rounds that have begun."""
        for begun in self._rounds:
            begun.pending.cancel()
        self._rounds.clear()
        for feed in self.feeds.values():
            feed.rewind()

    def _give(self, feed: LaneFeed, found: Yield) -> None:
        block = feed.add(found)
        if self._ledger is None:
            return
        first = (block.start // self._spacing + 1) * self._spacing
        offsets = np.arange(first, block.stop + 1, self._spacing, dtype=np.int64)
        before = block.first + np.searchsorted(found.places, offsets - block.start)
        anchors = list(zip(offsets.tolist(), before.tolist(), strict=True))
        self._ledger.note(feed.lane, anchors, feed.found, is_end=feed.done == feed.size)

    def _rate(self, feed: LaneFeed, usual: float) -> float:
        """Outputs an input, as expected of a lane; never 0."""
        return (feed.yielded + 4 * usual) / (feed.inputs + 4)

    def _usual_rate(self) -> float:
        inputs = sum(feed.inputs for feed in self.feeds.values())
        yielded = sum(feed.yielded for feed in self.feeds.values())
        return (yielded + 1) / (inputs + 1)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def is_requested(self) -> bool:
        """Whether all inputs to the end of every lane have been requested."""
        return all(self._opened[lane] >= feed.size for lane, feed in self.feeds.items())

    @property
    def horizon(self) -> float:
        """How many outputs a lane have been requested beyond those found, about; endless where there are no lanes."""
        feeds = self.feeds.values()
        if not self.is_requested:
            return self._horizon - min(feed.found for feed in feeds)
        return sum(feed.size - feed.done for feed in feeds) / len(feeds) if feeds else math.inf

    def look_ahead(self, at_once: int = _AHEAD_AT_ONCE) -> None:
        """Request what is expected to be needed next, as long as the reader has room; a few windows a lane."""
        usual = self._usual_rate()
        for _ in range(at_once):
            if self.is_requested or not self._reader.has_room:
                return
            step = max(1.0, self._round_rows / len(self.feeds) * usual)
            self._horizon = max(self._horizon, *(feed.found for feed in self.feeds.values())) + step
            entered: list[EnteredWindow] = []
            for lane, feed in self.feeds.items():
                inputs = max(0.0, self._horizon - feed.found) / self._rate(feed, usual)
                entered += self._open(lane, feed.done, min(feed.size, feed.done + math.ceil(inputs)))
            self._request(entered)

    def _open(self, lane: int, start: int, stop: int) -> list[EnteredWindow]:
        if stop <= self._opened[lane]:
            return []
        entered = list(self._spans.enter(lane, max(start, self._opened[lane]), stop))
        self._opened[lane] = entered[-1].window.stop if entered else stop
        return entered

    def _request(self, entered: Sequence[EnteredWindow]) -> None:
        """Request the chunks of windows, by when their first use is expected: lanes go through inputs at own rates."""
        if not entered:
            return
        usual = self._usual_rate()
        chunks = np.concatenate([window.chunks for window in entered])
        expected = np.concatenate([self._expect(window, usual) for window in entered])
        self._reader.request(chunks[np.argsort(expected, kind="stable")].tolist())

    def _expect(self, entered: EnteredWindow, usual: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        feed = self.feeds[entered.window.lane]
        offsets = entered.first_uses // self._plan.order.lanes
        return feed.found + (offsets - feed.done) * self._rate(feed, usual)

    def release(self, offset_of: Callable[[LaneFeed], int]) -> None:
        """Close the windows before each lane's offset, and let go of their chunks."""
        closed = self._spans.close_before(self._offsets(offset_of))
        done = [chunk for entered in closed for chunk in entered.chunks.tolist()]
        if done:
            self._reader.release(done)

    def next_uses(self, offset_of: Callable[[LaneFeed], int]) -> dict[int, int]:
        """When each chunk of the open windows is used next, as a number that grows with the time until then."""
        return self._spans.next_uses_from(self._offsets(offset_of))

    def _offsets(self, offset_of: Callable[[LaneFeed], int]) -> IntArray:
        offsets: IntArray = self._sizes.copy()  # windows of lanes that are dropped are closed
        for lane, feed in self.feeds.items():
            offsets[lane] = offset_of(feed)
        return offsets

    def end(self) -> None:
        """Stop what has begun, and let go of all chunks."""
        self._abandon()
        self.release(lambda feed: feed.size)


def cut_yield(found: Yield, start: int, stop: int) -> Yield:
    """The outputs of some of the inputs."""
    low, high = np.searchsorted(found.places, [start, stop]).tolist()
    has_rows, samples = len(found.rows) > 0, found.samples
    return Yield(
        found.ids[start:stop],
        found.places[low:high] - start,
        found.chunks[low:high] if has_rows else found.chunks,
        found.rows[low:high] if has_rows else found.rows,
        None if samples is None else samples[low:high],
        found.nbytes * (stop - start) // max(1, len(found.ids)),
        kept=None if found.kept is None else found.kept[start:stop],
    )
