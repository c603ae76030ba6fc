"""The outputs of one lane: found run by run, numbered from the epoch's beginning, kept until they are handed out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..columns import IntArray
from ..config.keep import BoolArray
from ..order.cached import cached_property
from .work import Yield


@dataclass(frozen=True, slots=True)
class LaneBlock:
    """The outputs of a lane's inputs ``start`` to ``stop``; the first one has the number ``first``."""

    start: int
    stop: int
    first: int
    found: Yield

    @property
    def count(self) -> int:
        return len(self.found.places)


@dataclass(frozen=True)
class LaneOutputs:
    """The outputs at hand: those from number ``first`` on, and all inputs that they come from.

    ``ids`` (inputs,) are sample ids, and ``stays`` (inputs,) which are in an output; ``places`` (outputs,) where the
    outputs are among the inputs, of which the first is the lane's input ``start``; ``chunks``, ``rows`` and ``samples``
    as in ``Yield``.
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
        """The ids of the inputs dropped before outputs ``start`` to ``stop``, and since the output before them."""
        inputs = self._inputs(start, stop)
        dropped: IntArray = self.ids[inputs][~self.stays[inputs]]
        return dropped

    def delivered(self, start: int, stop: int) -> IntArray:
        """The ids of the inputs that outputs ``start`` to ``stop`` are the first to hold."""
        ids, counts = self._delivered
        low = counts[start - self.first - 1] if start > self.first else 0
        return ids[low : counts[stop - self.first - 1]]

    @cached_property
    def _delivered(self) -> tuple[IntArray, memoryview]:
        """The ids of all inputs that are in an output, and how many of them there are up to each output."""
        counts = np.cumsum(self.stays, dtype=np.int64)[self.places]
        return self.ids[self.stays], counts.data

    def _inputs(self, start: int, stop: int) -> slice:
        low = int(self.places[start - self.first - 1]) + 1 if start > self.first else 0
        return slice(low, int(self.places[stop - self.first - 1]) + 1)


def join_blocks(blocks: Iterable[LaneBlock]) -> LaneOutputs:
    """Blocks of a lane that follow one another, as one."""
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
        """Whether there was room, which then is taken."""
        if nbytes > self.nbytes:
            return False
        self.nbytes -= nbytes
        return True


class LaneFeed:
    """One lane of a rank, from input ``offset`` on, before which the lane has ``outputs`` outputs. One thread uses it.

    ``asked`` is the first input that no work has begun on, ``done`` the first whose outcome is not known, ``found`` the
    number of outputs before that. ``failed`` is what input ``done`` raised. Of what comes before output ``base``
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
        self.ends: deque[LaneBlock] = deque()  # of what is only counted, the last blocks
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
        """How many inputs have been worked on."""
        return self.done - self._begun

    @property
    def yielded(self) -> int:
        """How many outputs these had."""
        return self.found - self._found_before

    def count_from(self, output: int, least_kept: int, room: Room) -> None:
        """From an output on, only count what there is no room for; of the last ``least_kept`` outputs keep the ids."""
        self._counted_from, self._least_kept, self._room = output, least_kept, room

    def holds_from(self, output: int) -> bool:
        """Whether all outputs from a number on, to the lane's end, are at hand."""
        begun = self.blocks[0].first if self.blocks else self.found
        return self.done == self.size and not self.ends and begun <= max(self._base, output - 1)

    def has(self, start: int, stop: int) -> bool:
        """Whether outputs ``start`` to ``stop``, and the one before them, are at hand."""
        if not self.blocks:
            return False
        last = self.blocks[-1]
        return self.blocks[0].first <= max(self._base, start - 1) and stop <= last.first + last.count

    def add(self, found: Yield) -> LaneBlock:
        """Take in the outcome of the next inputs."""
        block = LaneBlock(self.done, self.done + len(found.ids), self.found, found)
        counts = self._counted_from is not None and block.first >= self._counted_from
        if counts and (self.ends or not self._room.take(found.nbytes)):
            none = np.empty(0, np.int64)
            of_inputs = Yield(found.ids, found.places, none, none, (), kept=found.kept)
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
        """What is at hand. There must be some inputs."""
        if self._outputs is None:
            self._outputs = join_blocks(self.blocks)
        return self._outputs

    def pass_by(self, output: int) -> None:
        """Drop what comes before an output; the one before it stays, which says where the next one's inputs begin."""
        while len(self.blocks) > 1 and self.blocks[0].first + self.blocks[0].count < output:
            self.blocks.popleft()
            self._outputs = None

    def next_input(self, output: int) -> int:
        """The input that an output comes from, if it is found; else the first input whose outcome is not known."""
        for block in self.blocks:
            if block.first <= output < block.first + block.count:
                return block.start + int(block.found.places[output - block.first])
        return self.done

    def after(self, output: int) -> tuple[IntArray, IntArray]:
        """The ids of all inputs since the output before ``output``: the dropped, and outputs. The lane is over."""
        blocks = [*self.ends] if self._has_gap else [*self.blocks, *self.ends]
        if not blocks:
            none = np.empty(0, np.int64)
            return none, none
        rest = join_blocks(blocks)
        low = int(rest.places[output - rest.first - 1]) + 1 if output > rest.first else 0
        ids, stays = rest.ids[low:], rest.stays[low:]
        return ids[~stays], ids[stays]
