"""The lanes of one rank in one epoch: windows are read ahead and worked on in rounds, and yield outputs.

Outputs are numbered from the epoch's beginning, lane by lane, and kept until they are handed out.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConfigError, LoaderClosedError
from ..order.cached import cached_property
from ..order.plan import EpochPlan, Segments, Share, lane_sizes
from ..order.spans import ChunkRows, EnteredWindow, EpochSpans, Span
from .transforms import LaneTransform, PendingResult, TransformResult

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..config.keep import BoolArray
    from ..pipeline.assembler import Equipment
    from ..ranks.ledger import EpochLedger

_ROUNDS = 3  # that are worked on at once: while one is waited for, the threads have the next
_MARGIN = 1.1  # inputs requested, relative to the expected need
_AHEAD_AT_ONCE = 8
_MOST_ROWS = 1 << 16
_SHOWN_IDS = 8

Range = tuple[int, int, int]  # lane, first input, one past the last


@dataclass(frozen=True, slots=True)
class LaneBlock:
    """The outputs of a lane's inputs ``start`` to ``stop``; the first one has the number ``first``."""

    start: int
    stop: int
    first: int
    found: TransformResult

    @property
    def count(self) -> int:
        return len(self.found.places)


@dataclass(frozen=True)
class LaneOutputs:
    """Loaded outputs: those from number ``first`` on, and all inputs that they come from.

    ``ids`` (inputs,) are sample ids, and ``stays`` (inputs,) which are in an output; ``places`` (outputs,) where the
    outputs are among the inputs, of which the first is the lane's input ``start``; ``chunks``, ``rows`` and ``samples``
    as in ``TransformResult``.
    """

    first: int
    start: int
    ids: IntArray
    stays: BoolArray
    places: IntArray
    chunks: IntArray
    rows: IntArray
    samples: Sequence[Any]
    sample_bytes: int  # of one, about

    def dropped(self, start: int, stop: int) -> IntArray:
        """List the ids of the inputs dropped before outputs ``start`` to ``stop``, and since the output before them."""
        inputs = self._inputs(start, stop)
        dropped: IntArray = self.ids[inputs][~self.stays[inputs]]
        return dropped

    def delivered(self, start: int, stop: int) -> IntArray:
        """List the ids of the inputs that outputs ``start`` to ``stop`` are the first to hold."""
        ids, counts = self._delivered
        low = counts[start - self.first - 1] if start > self.first else 0
        return ids[low : counts[stop - self.first - 1]]

    @cached_property
    def _delivered(self) -> tuple[IntArray, memoryview]:
        """List the ids of all inputs that are in an output, and how many of them there are up to each output."""
        counts = np.cumsum(self.stays, dtype=np.int64)[self.places]
        return self.ids[self.stays], counts.data

    def _inputs(self, start: int, stop: int) -> slice:
        low = int(self.places[start - self.first - 1]) + 1 if start > self.first else 0
        return slice(low, int(self.places[stop - self.first - 1]) + 1)


def join_blocks(blocks: Iterable[LaneBlock]) -> LaneOutputs:
    """Join blocks of a lane that follow one another."""
    some = list(blocks)
    shift = some[0].start
    return LaneOutputs(
        first=some[0].first,
        start=shift,
        ids=np.concatenate([block.found.ids for block in some]),
        stays=np.concatenate([block.found.stays for block in some]),
        places=np.concatenate([block.found.places + (block.start - shift) for block in some]),
        chunks=np.concatenate([block.found.chunks for block in some]),
        rows=np.concatenate([block.found.rows for block in some]),
        samples=[sample for block in some for sample in block.found.samples or ()],
        sample_bytes=sum(block.found.nbytes for block in some) // max(1, sum(block.count for block in some)),
    )


@dataclass(slots=True)
class Room:
    """Bytes that outputs found ahead of need may still take."""

    nbytes: int

    def take(self, nbytes: int) -> bool:
        """Take ``nbytes`` if there is room; return whether there was."""
        if nbytes > self.nbytes:
            return False
        self.nbytes -= nbytes
        return True


class LaneBuffer:
    """One lane of a rank, from input ``offset`` on, before which the lane has ``outputs`` outputs. One thread uses it.

    ``asked`` is the first input that no work has begun on, ``done`` the first whose outcome is not known, ``found`` the
    number of outputs before that. ``failed`` is the error of input ``done``. Of the outputs before ``base``
    nothing is asked.
    """

    def __init__(self, lane: int, offset: int, outputs: int, size: int, base: int = 0) -> None:
        self.lane = lane
        self.size = size
        self._base = base
        self.asked = self.done = self._begun = offset
        self.found = self._found_before = outputs
        self.failed: Exception | None = None
        self.blocks: deque[LaneBlock] = deque()
        self.ends: deque[LaneBlock] = deque()  # the last blocks of outputs that are only counted
        self._counted_from: int | None = None
        self._least_kept = 0
        self._room = Room(0)
        self._has_gap = False  # between blocks and ends
        self._outputs: LaneOutputs | None = None  # of the blocks as they are

    @property
    def is_over(self) -> bool:
        return self.done == self.size or self.failed is not None

    @property
    def inputs(self) -> int:
        """The number of inputs that have been worked on."""
        return self.done - self._begun

    @property
    def yielded(self) -> int:
        """The number of outputs of these inputs."""
        return self.found - self._found_before

    def count_from(self, output: int, least_kept: int, room: Room) -> None:
        """Count, from an output on, those without room; of the last ``least_kept`` outputs keep the ids."""
        self._counted_from, self._least_kept, self._room = output, least_kept, room

    def has(self, start: int, stop: int) -> bool:
        """Return whether outputs ``start`` to ``stop``, and the one before them, are loaded."""
        if not self.blocks:
            return False
        last = self.blocks[-1]
        return self.blocks[0].first <= max(self._base, start - 1) and stop <= last.first + last.count

    def add(self, found: TransformResult) -> LaneBlock:
        """Add the outcome of the next inputs."""
        block = LaneBlock(self.done, self.done + len(found.ids), self.found, found)
        counts = self._counted_from is not None and block.first >= self._counted_from
        if counts and (self.ends or not self._room.take(found.nbytes)):
            none = np.empty(0, np.int64)
            of_inputs = TransformResult(found.ids, found.places, none, none, (), kept=found.kept)
            self.ends.append(LaneBlock(block.start, block.stop, block.first, of_inputs))
            kept = sum(each.count for each in self.ends)
            while kept - self.ends[0].count >= self._least_kept and len(self.ends) > 1:
                kept -= self.ends.popleft().count
                self._has_gap = True
        else:
            self.blocks.append(block)
            self._outputs = None
        self.done, self.found = block.stop, block.first + block.count
        return block

    def rewind(self) -> None:
        """Forget that work has begun on inputs whose outcome is not known."""
        self.asked = self.done

    def outputs(self) -> LaneOutputs:
        """Collect the loaded outputs. There must be some inputs."""
        if self._outputs is None:
            self._outputs = join_blocks(self.blocks)
        return self._outputs

    def pass_by(self, output: int) -> None:
        """Drop the outputs before one; its predecessor stays, which says where its inputs begin."""
        while len(self.blocks) > 1 and self.blocks[0].first + self.blocks[0].count < output:
            self.blocks.popleft()
            self._outputs = None

    def next_input(self, output: int) -> int:
        """Find the input that an output comes from, if it is known; else the first input whose outcome is not known."""
        for block in self.blocks:
            if block.first <= output < block.first + block.count:
                return block.start + int(block.found.places[output - block.first])
        return self.done

    def after(self, output: int) -> tuple[IntArray, IntArray]:
        """Collect the ids of all inputs since the output before ``output``: (dropped, outputs). The lane is over."""
        blocks = [*self.ends] if self._has_gap else [*self.blocks, *self.ends]
        if not blocks:
            none = np.empty(0, np.int64)
            return none, none
        rest = join_blocks(blocks)
        low = int(rest.places[output - rest.first - 1]) + 1 if output > rest.first else 0
        ids, stays = rest.ids[low:], rest.stays[low:]
        return ids[~stays], ids[stays]


@dataclass(frozen=True, slots=True)
class _Round:
    ranges: Sequence[Range]
    pending: PendingResult


@dataclass(frozen=True, slots=True)
class _Failed:
    """An error of reading an input, at its place in the order."""

    error: Exception

    @property
    def ids(self) -> IntArray:
        return np.empty(0, np.int64)

    def result(self) -> TransformResult:
        none = np.empty(0, np.int64)
        return TransformResult(none, none, none, none, (), failed=self.error)

    def cancel(self) -> None:
        pass


class LaneBuffers:
    """Some lanes of an epoch, of which outputs are wanted. Used by the assembler thread alone.

    ``spacing``: the number of inputs of a lane between anchors, at which work may begin again; ``ledger`` gets these.
    """

    def __init__(
        self,
        plan: EpochPlan,
        share: Share,
        work: LaneTransform,
        equipment: Equipment,
        *,
        spacing: int,
        round_rows: int,
        ledger: EpochLedger | None,
    ) -> None:
        self.buffers: dict[int, LaneBuffer] = {}
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
        self.waiting: tuple[str, float] | None = None  # the pending work that is waited for, since this perf_counter()
        self._horizon = 0.0  # outputs a lane, beyond those found, whose inputs have been requested

    def add(self, lane: int, offset: int, outputs: int, base: int = 0) -> LaneBuffer:
        """Begin with a lane at an input, before which it has ``outputs`` outputs; again, if it has begun before it.

        ``base``: see ``LaneBuffer``.
        """
        if lane in self.buffers:
            self._abandon()
        buffer = LaneBuffer(lane, offset, outputs, int(self._sizes[lane]), base)
        self.buffers[lane] = buffer
        self._opened[lane] = offset
        if self._ledger is not None and buffer.is_over:
            self._ledger.note(lane, (), outputs, is_end=True)
        return buffer

    def drop(self, lane: int) -> None:
        """Let go of a lane for good."""
        self._abandon()
        del self.buffers[lane]

    # -- work -----------------------------------------------------------------------------------------------------

    def reach(self, targets: Mapping[int, int], ahead: Mapping[int, int]) -> None:
        """Work until each lane reaches its target of outputs, ends, or fails; go on to ``ahead``."""
        while True:
            while len(self._rounds) < _ROUNDS and (self._begin(targets) or self._begin(ahead)):
                self.look_ahead()
            if not any(
                self.buffers[lane].found < most and not self.buffers[lane].is_over for lane, most in targets.items()
            ):
                return
            if self._stopping.is_set() or not self._rounds:
                assert self._stopping.is_set()
                return
            self._settle(self._rounds.popleft())

    def _begin(self, targets: Mapping[int, int]) -> bool:
        """Begin a round towards the targets, as large as expected to be needed; False if none is needed."""
        wanted: dict[int, float] = {}
        usual = self._usual_rate()
        for lane, most in targets.items():
            buffer = self.buffers[lane]
            if buffer.asked == buffer.size or buffer.failed is not None:
                continue
            rate = self._rate(buffer, usual)
            lacking = most - buffer.found - (buffer.asked - buffer.done) * rate
            if lacking > 0:
                wanted[lane] = min(lacking / rate * _MARGIN + 1, buffer.size - buffer.asked)
        if not wanted:
            return False
        unit = self._work.unit
        shrink = min(1.0, self._round_rows / sum(wanted.values()))
        if unit > 1:  # lanes that are behind come first, and wait for no others
            wanted = dict(sorted(wanted.items(), key=lambda each: self.buffers[each[0]].found))
        ranges: list[Range] = []
        for lane, count in wanted.items():
            if unit > 1 and sum(stop - start for _, start, stop in ranges) >= self._round_rows:
                break
            buffer = self.buffers[lane]
            stop = min(buffer.size, buffer.asked + self._whole(max(1, math.ceil(count * shrink))))
            ranges.append((lane, buffer.asked, stop))
        self._start(ranges)
        return True

    def _start(self, ranges: Sequence[Range]) -> bool:
        """Open the windows of a round, and start it; False where reading failed: the lane reports it in its turn."""
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
            self.buffers[lane].asked = stop
            return False
        self._rounds.append(_Round(ranges, pending))
        for lane, _, stop in ranges:
            self.buffers[lane].asked = stop
        return True

    def _whole(self, inputs: int) -> int:
        """Round up to a whole number of units."""
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
        """Wait for a round, and give each lane its outcome."""
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
                self._give(self.buffers[lane], cut_result(found, slot, slot + reached))
            slot += reached
            if reached < stop - start:
                break
        if found.failed is not None:
            if self._stopping.is_set():  # then pending work may fail, and other ranks must not hear of it
                raise LoaderClosedError("the loader was closed while it worked on samples") from found.failed
            self.buffers[lane].failed = found.failed
            self._abandon()

    def _abandon(self) -> None:
        """Forget the rounds that have begun."""
        for begun in self._rounds:
            begun.pending.cancel()
        self._rounds.clear()
        for buffer in self.buffers.values():
            buffer.rewind()

    def _give(self, buffer: LaneBuffer, found: TransformResult) -> None:
        block = buffer.add(found)
        if self._ledger is None:
            return
        first = (block.start // self._spacing + 1) * self._spacing
        offsets = np.arange(first, block.stop + 1, self._spacing, dtype=np.int64)
        before = block.first + np.searchsorted(found.places, offsets - block.start)
        anchors = list(zip(offsets.tolist(), before.tolist(), strict=True))
        self._ledger.note(buffer.lane, anchors, buffer.found, is_end=buffer.done == buffer.size)

    def _rate(self, buffer: LaneBuffer, usual: float) -> float:
        """Estimate the outputs per input of a lane; never 0."""
        return (buffer.yielded + 4 * usual) / (buffer.inputs + 4)

    def _usual_rate(self) -> float:
        inputs = sum(buffer.inputs for buffer in self.buffers.values())
        yielded = sum(buffer.yielded for buffer in self.buffers.values())
        return (yielded + 1) / (inputs + 1)

    # -- reading --------------------------------------------------------------------------------------------------

    @property
    def is_requested(self) -> bool:
        """Return whether all inputs to the end of every lane have been requested."""
        return all(self._opened[lane] >= buffer.size for lane, buffer in self.buffers.items())

    @property
    def horizon(self) -> float:
        """Estimate how many outputs of a lane are requested beyond those found; infinite without lanes."""
        buffers = self.buffers.values()
        if not self.is_requested:
            return self._horizon - min(buffer.found for buffer in buffers)
        return sum(buffer.size - buffer.done for buffer in buffers) / len(buffers) if buffers else math.inf

    def look_ahead(self, at_once: int = _AHEAD_AT_ONCE) -> None:
        """Request the chunks expected next, as long as the reader has room; a few windows a lane."""
        usual = self._usual_rate()
        for _ in range(at_once):
            if self.is_requested or not self._reader.has_room:
                return
            step = max(1.0, self._round_rows / len(self.buffers) * usual)
            self._horizon = max(self._horizon, *(buffer.found for buffer in self.buffers.values())) + step
            entered: list[EnteredWindow] = []
            for lane, buffer in self.buffers.items():
                inputs = max(0.0, self._horizon - buffer.found) / self._rate(buffer, usual)
                entered += self._open(lane, buffer.done, min(buffer.size, buffer.done + math.ceil(inputs)))
            self._request(entered)

    def _open(self, lane: int, start: int, stop: int) -> list[EnteredWindow]:
        if stop <= self._opened[lane]:
            return []
        entered = list(self._spans.enter(lane, max(start, self._opened[lane]), stop))
        self._opened[lane] = entered[-1].window.stop if entered else stop
        return entered

    def _request(self, entered: Sequence[EnteredWindow]) -> None:
        """Request the chunks of windows, by expected first use: lanes consume inputs at different rates."""
        if not entered:
            return
        usual = self._usual_rate()
        chunks = np.concatenate([window.chunks for window in entered])
        expected = np.concatenate([self._expect(window, usual) for window in entered])
        self._reader.request(chunks[np.argsort(expected, kind="stable")].tolist())

    def _expect(self, entered: EnteredWindow, usual: float) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        buffer = self.buffers[entered.window.lane]
        offsets = entered.first_uses // self._plan.order.lanes
        return buffer.found + (offsets - buffer.done) * self._rate(buffer, usual)

    def release(self, offset_of: Callable[[LaneBuffer], int]) -> None:
        """Close the windows before each lane's offset, and release their chunks."""
        closed = self._spans.close_before(self._offsets(offset_of))
        done = [chunk for entered in closed for chunk in entered.chunks.tolist()]
        if done:
            self._reader.release(done)

    def next_uses(self, offset_of: Callable[[LaneBuffer], int]) -> dict[int, int]:
        """Map each chunk of the open windows to its next use, as a number that grows with the time until then."""
        return self._spans.next_uses_from(self._offsets(offset_of))

    def _offsets(self, offset_of: Callable[[LaneBuffer], int]) -> IntArray:
        offsets: IntArray = self._sizes.copy()  # windows of lanes that are dropped are closed
        for lane, buffer in self.buffers.items():
            offsets[lane] = offset_of(buffer)
        return offsets

    def end(self) -> None:
        """Stop pending work, and release all chunks."""
        self._abandon()
        self.release(lambda buffer: buffer.size)


def cut_result(found: TransformResult, start: int, stop: int) -> TransformResult:
    """Cut out the outputs of some of the inputs."""
    low, high = np.searchsorted(found.places, [start, stop]).tolist()
    has_rows, samples = len(found.rows) > 0, found.samples
    return TransformResult(
        found.ids[start:stop],
        found.places[low:high] - start,
        found.chunks[low:high] if has_rows else found.chunks,
        found.rows[low:high] if has_rows else found.rows,
        None if samples is None else samples[low:high],
        found.nbytes * (stop - start) // max(1, len(found.ids)),
        kept=None if found.kept is None else found.kept[start:stop],
    )
