"""The outputs of one epoch of a source on one rank: its lanes are worked on, and all ranks know how far they reach."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..errors import DatasetError
from ..pipeline.assembler import Equipment, time_assembly
from .lanes import LaneBuffer, LaneBuffers, LaneOutputs, Room

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..order.outputs import Cursors
    from ..order.plan import EpochPlan, Segments, Share
    from ..ranks.ledger import EpochLedger
    from .transforms import LaneTransform

_NO_IDS: IntArray = np.empty(0, np.int64)
ALL_OUTPUTS = 1 << 62  # more than a lane can have


@dataclass(frozen=True, kw_only=True)
class LaneOptions:
    """Options for working on lanes, in portions. ``spacing``, ``round_rows``: see ``LaneBuffers``.

    ``room_bytes``: the room for outputs that are found while lanes are counted. ``patience``: how often a lane of
    another rank that was taken part of may not be, before it is dropped.
    """

    spacing: int
    round_rows: int
    room_bytes: int
    patience: int


class EpochSupply:
    """The outputs of an epoch from where lanes are at ``cursors``. Used by the assembler thread alone.

    ``own`` are the lanes that this rank works on ahead, and posts the outputs of. Of other lanes, and of those that
    were only counted, it finds the outputs that it takes part of from the last anchor before them on: it borrows them.
    """

    def __init__(
        self,
        plan: EpochPlan,
        share: Share,
        transform: LaneTransform,
        equipment: Equipment,
        ledger: EpochLedger,
        options: LaneOptions,
        *,
        cursors: Cursors,
        own: Iterable[int],
    ) -> None:
        self.plan = plan
        self.ledger = ledger
        self.world_size = share.world_size
        self._transform = transform
        self._counters = equipment.counters
        self._room_bytes = options.room_bytes
        ledger.begin_at(cursors)

        def make_buffers(of: EpochLedger | None) -> LaneBuffers:
            spacing, round_rows = options.spacing, options.round_rows
            return LaneBuffers(plan, share, transform, equipment, spacing=spacing, round_rows=round_rows, ledger=of)

        self.lanes = make_buffers(ledger)
        for lane in own:
            self.lanes.add(lane, int(cursors.offsets[lane]), int(cursors.outputs[lane]), ledger.base(lane))
        self._borrowed = make_buffers(None)
        self._taken: set[int] = set()  # lanes that are taken from ``_borrowed``
        self._unused: dict[int, int] = {}  # of each lane of ``_borrowed``, how often it was not
        self._patience = options.patience
        self._posted: set[int] = set()  # lanes of which other ranks know that they failed
        self._before = cursors.taken  # (lanes,): the outputs of each lane that were handed out

    @property
    def is_per_input(self) -> bool:
        """See ``LaneTransform``."""
        return self._transform.is_per_input

    # -- ahead of need --------------------------------------------------------------------------------------------

    def reach(self, goal: int, ahead: int) -> None:
        """Work on this rank's lanes until all outputs before position ``goal`` are found; begin with the next ones.

        Posts outcomes and errors to other ranks.
        """
        targets, beyond = (dict(enumerate(self.ledger.taken_at(each).tolist())) for each in (goal, ahead))
        own = self.lanes.buffers
        self._reach({lane: targets[lane] for lane in own}, {lane: beyond[lane] for lane in own})

    def count(self, taken: IntArray, least_kept: int) -> None:
        """Count all outputs of this rank's lanes; beyond ``taken`` (lanes,), keep only those that there is room for.

        Of the last ``least_kept`` outputs of a lane, at least, ids are kept.
        """
        room = Room(self._room_bytes)
        for lane, buffer in self.lanes.buffers.items():
            buffer.count_from(int(taken[lane]), least_kept, room)
        everything = dict.fromkeys(self.lanes.buffers, ALL_OUTPUTS)
        self._reach(everything, everything)

    def _reach(self, targets: Mapping[int, int], ahead: Mapping[int, int]) -> None:
        with time_assembly(self._counters):
            self.lanes.reach(targets, ahead)
        self.ledger.post()
        for lane, buffer in self.lanes.buffers.items():
            if buffer.failed is not None and lane not in self._posted:
                self._posted.add(lane)
                self.ledger.fail(lane, buffer.found, buffer.failed)

    def post_error(self, error: Exception) -> None:
        """Post to other ranks that this one stops, beyond what they know of its lanes. Called by any thread."""
        if error is self.ledger.raised:
            return  # they know
        with suppress(DatasetError):  # the store is gone, and this error is why, or says more than that
            self.ledger.post_error(list(self.lanes.buffers), error)

    def describe_wait(self, position: int) -> str:
        """Describe which ranks block progress to a position."""
        ranks = ", ".join(map(str, self.ledger.ranks_behind(position)))
        return f"what rank {ranks} keeps of its lanes, in epoch {self.plan.epoch} before position {position}"

    # -- what a rank takes ----------------------------------------------------------------------------------------

    def reach_parts(self, segments: Segments) -> None:
        """Load the outputs of all segments. Raises the error that stops a lane."""
        borrowed, targets = self._borrowed, {}
        for lane, (start, stop) in _ranges(segments).items():
            own = self.lanes.buffers.get(lane)
            if own is not None and own.has(start, stop):
                continue
            buffer = borrowed.buffers.get(lane)
            offset, outputs = self.ledger.anchor_before(lane, start)
            if buffer is None or buffer.asked < offset:
                borrowed.add(lane, offset, outputs, self.ledger.base(lane))
            targets[lane] = stop
        self._drop_unused(targets)
        if not targets:
            return
        with time_assembly(self._counters):
            borrowed.reach(targets, targets)
        for buffer in borrowed.buffers.values():
            if buffer.failed is not None and buffer.found < targets.get(buffer.lane, 0):
                raise buffer.failed

    def _drop_unused(self, used: Mapping[int, int]) -> None:
        """Drop borrowed lanes that have not been taken part of for a while."""
        for lane in list(self._borrowed.buffers):
            unused = self._unused[lane] = 0 if lane in used else self._unused.get(lane, 0) + 1
            if unused > self._patience:
                self._borrowed.drop(lane)
                del self._unused[lane]
        self._taken = set(used)

    def at_hand(self, segments: Segments) -> dict[int, LaneOutputs]:
        """Get the loaded outputs of the segments' lanes."""
        lanes = np.unique(segments.lane).tolist()
        return {lane: (self._borrowed if lane in self._taken else self.lanes).buffers[lane].outputs() for lane in lanes}

    def pass_by(self, position: int) -> None:
        """Drop the outputs before a position."""
        self._before = self.ledger.taken_at(position)
        for buffers in (self.lanes, self._borrowed):
            for buffer in buffers.buffers.values():
                buffer.pass_by(int(self._before[buffer.lane]))
            buffers.release(self._first_needed)

    def _first_needed(self, buffer: LaneBuffer) -> int:
        """Find the first input of a lane whose chunk is still needed."""
        if self._transform.gives_samples:
            return buffer.done
        return buffer.next_input(int(self._before[buffer.lane]))

    def rest(self, position: int) -> tuple[IntArray, IntArray]:
        """Collect the ids of all inputs beyond a position, in this rank's lanes: (dropped, outputs).

        The lanes' ends are reached.
        """
        dropped, left = [_NO_IDS], [_NO_IDS]
        taken = self.ledger.taken_at(position)
        for lane, buffer in self.lanes.buffers.items():
            if self.ledger.keeps(lane):
                after, unused = buffer.after(int(taken[lane]))
                dropped.append(after)
                left.append(unused)
        return np.concatenate(dropped), np.concatenate(left)

    def end(self) -> None:
        """Stop pending work, and release all chunks."""
        self.lanes.end()
        self._borrowed.end()

    # -- what others ask ------------------------------------------------------------------------------------------

    def next_uses(self) -> dict[int, int]:
        """Map each chunk to its next use; see ``LaneBuffers.next_uses``."""
        return self.lanes.next_uses(self._first_needed) | self._borrowed.next_uses(self._first_needed)

    @property
    def waiting(self) -> tuple[str, float] | None:
        """Describe the pending work that is waited for, and since when."""
        return self.lanes.waiting or self._borrowed.waiting


def _ranges(segments: Segments) -> dict[int, tuple[int, int]]:
    """Map each lane of some segments to its first output and one past the last."""
    by_lane = np.argsort(segments.lane, kind="stable")
    lanes, begins = np.unique(segments.lane[by_lane], return_index=True)
    if not len(lanes):
        return {}
    starts = np.minimum.reduceat(segments.start[by_lane], begins)
    stops = np.maximum.reduceat(segments.stop[by_lane], begins)
    return dict(zip(lanes.tolist(), zip(starts.tolist(), stops.tolist(), strict=True), strict=True))
