"""What one epoch of a data set yields on one rank: lanes are worked on, and all ranks agree on how far they reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from ..columns import IntArray
from ..errors import DatasetError
from ..order.cursors import Cursors
from ..order.plan import EpochPlan, Segments, Share
from ..pipeline.assembler import Equipment
from ..ranks.ledger import EpochLedger
from .feed import LaneFeed, LaneOutputs, Room
from .feeds import LaneFeeds
from .work import WindowWork

_NO_IDS: IntArray = np.empty(0, np.int64)
ALL_OUTPUTS = 1 << 62  # more than a lane can have


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """How the outputs of lanes are found. ``spacing``, ``round_rows``: see ``LaneFeeds``.

    ``room_bytes``: what outputs may take that are found while lanes are counted. ``patience``: how often a lane of
    another rank that was taken part of may not be, before it is let go of.
    """

    spacing: int
    round_rows: int
    room_bytes: int
    patience: int = 0


class EpochSupply:
    """The outputs of an epoch from a position on, where lanes are at ``cursors``. Used by the assembler thread alone.

    ``lanes`` are those that this rank works on ahead, and tells the others of. Of other lanes, and of those that were
    only counted, it finds the outputs that it takes part of from the last anchor before them on.
    """

    def __init__(
        self,
        plan: EpochPlan,
        share: Share,
        work: WindowWork,
        equipment: Equipment,
        ledger: EpochLedger,
        options: FeedOptions,
        *,
        position: int,
        cursors: Cursors,
        lanes: Iterable[int],
    ) -> None:
        self.plan = plan
        self.ledger = ledger
        self._work = work
        self._equipment = equipment
        self._room_bytes = options.room_bytes
        ledger.begin_at(cursors)

        def make_feeds(of: EpochLedger | None) -> LaneFeeds:
            spacing, round_rows = options.spacing, options.round_rows
            return LaneFeeds(plan, share, work, equipment, spacing=spacing, round_rows=round_rows, ledger=of)

        self.feeds = make_feeds(ledger)
        for lane in lanes:
            self.feeds.add(lane, int(cursors.offsets[lane]), int(cursors.outputs[lane]), ledger.base(lane))
        self._borrowed = make_feeds(None)
        self._held: set[int] | None = None  # lanes of ``feeds`` whose outputs are at hand; None: all
        self._taken: set[int] = set()  # lanes that are taken from ``_borrowed``
        self._unused: dict[int, int] = {}  # of each lane of ``_borrowed``, how often it was not
        self._patience = options.patience
        self._told: set[int] = set()  # lanes of which other ranks know that they failed
        self._position = position  # up to which outputs are dealt
        self._before = ledger.taken_at(position)  # (lanes,): the outputs of each lane before it

    @property
    def one_each(self) -> bool:
        """See ``WindowWork``."""
        return self._work.one_each

    # -- ahead of need --------------------------------------------------------------------------------------------

    def reach(self, goal: int, ahead: int) -> None:
        """Work on this rank's lanes until they have what they give before position ``goal``; begin with what follows.

        Tells other ranks what was found, and what failed.
        """
        targets, beyond = (dict(enumerate(self.ledger.taken_at(each).tolist())) for each in (goal, ahead))
        lanes = self.feeds.feeds
        self._timed_reach(self.feeds, {lane: targets[lane] for lane in lanes}, {lane: beyond[lane] for lane in lanes})
        self._tell()

    def count(self, taken: IntArray, least_kept: int) -> None:
        """Find the totals of this rank's lanes, without keeping what there is no room for beyond ``taken`` (lanes,).

        Of the last ``least_kept`` outputs of a lane, at least, ids are kept.
        """
        room = Room(self._room_bytes)
        for lane, feed in self.feeds.feeds.items():
            feed.count_from(int(taken[lane]), least_kept, room)
        everything = dict.fromkeys(self.feeds.feeds, ALL_OUTPUTS)
        self._timed_reach(self.feeds, everything, everything)
        self._tell()

    def hold_from(self, taken: IntArray) -> None:
        """Keep of the lanes, whose ends are reached, those of which all outputs from ``taken`` (lanes,) on are at hand.

        Others are read again when they are taken.
        """
        self._before = self.ledger.taken_at(self._position)
        self._held = {lane for lane, feed in self.feeds.feeds.items() if feed.holds_from(int(taken[lane]))}
        held = self._held
        self.feeds.release(lambda feed: self.first_needed(feed) if feed.lane in held else feed.size)

    def _timed_reach(self, feeds: LaneFeeds, targets: dict[int, int], ahead: dict[int, int]) -> None:
        counters = self._equipment.counters
        waited, started = counters.totals().chunk_wait_s, time.perf_counter()
        feeds.reach(targets, ahead)
        waited = counters.totals().chunk_wait_s - waited
        counters.add(since=started, assemble_s=max(0.0, time.perf_counter() - started - waited))

    def _tell(self) -> None:
        self.ledger.post()
        for lane, feed in self.feeds.feeds.items():
            if feed.failed is not None and lane not in self._told:
                self._told.add(lane)
                self.ledger.fail(lane, feed.found, feed.failed)

    def tell_error(self, error: Exception) -> None:
        """Tell other ranks that this one does not go on, beyond what they know of its lanes. Called by any thread."""
        if error is self.ledger.raised:
            return  # they know
        with suppress(DatasetError):  # the store is gone, and this error is why, or says more than that
            self.ledger.post_error(list(self.feeds.feeds), error)

    def wait(self, is_enough: Callable[[], bool], position: int) -> None:
        """Wait until other ranks have told enough of what comes before a position. Raises LoaderClosedError."""
        self.ledger.wait(is_enough, self.describe_wait(position), self._equipment.stopping.is_set)

    def describe_wait(self, position: int) -> str:
        """Whom a rank waits for that needs to know what comes before a position."""
        ranks = ", ".join(map(str, self.ledger.ranks_behind(position)))
        return f"what rank {ranks} keeps of its lanes, in epoch {self.plan.epoch} before position {position}"

    # -- what a rank takes ----------------------------------------------------------------------------------------

    def reach_parts(self, segments: Segments) -> None:
        """Have the outputs of all segments at hand. Raises what keeps a lane from giving them."""
        feeds, targets = self._borrowed, {}
        for lane, (start, stop) in _ranges(segments).items():
            if self._is_at_hand(lane, start, stop):
                continue
            feed = feeds.feeds.get(lane)
            offset, outputs = self.ledger.anchor_before(lane, start)
            if feed is None or feed.asked < offset:
                feeds.add(lane, offset, outputs, self.ledger.base(lane))
            targets[lane] = stop
        self._drop_unused(targets)
        if not targets:
            return
        self._timed_reach(feeds, targets, targets)
        for feed in feeds.feeds.values():
            if feed.failed is not None and feed.found < targets.get(feed.lane, 0):
                raise feed.failed

    def _is_at_hand(self, lane: int, start: int, stop: int) -> bool:
        """Whether this rank's own work on a lane has given what is asked for."""
        if self._held is not None:
            return lane in self._held
        feed = self.feeds.feeds.get(lane)
        return feed is not None and feed.has(start, stop)

    def _drop_unused(self, used: Mapping[int, int]) -> None:
        """Let go of borrowed lanes that have not been taken part of for a while."""
        for lane in list(self._borrowed.feeds):
            unused = self._unused[lane] = 0 if lane in used else self._unused.get(lane, 0) + 1
            if unused > self._patience:
                self._borrowed.drop(lane)
                del self._unused[lane]
        self._taken = set(used)

    def at_hand(self, segments: Segments) -> dict[int, LaneOutputs]:
        """What is at hand of the lanes of some segments."""
        lanes = np.unique(segments.lane).tolist()
        feeds = {lane: self._borrowed.feeds[lane] if lane in self._taken else self.feeds.feeds[lane] for lane in lanes}
        return {lane: feed.outputs() for lane, feed in feeds.items()}

    def pass_by(self, position: int) -> None:
        """Drop what comes before a position."""
        self._position = position
        self._before = self.ledger.taken_at(position)
        for feeds in (self.feeds, self._borrowed):
            for feed in feeds.feeds.values():
                feed.pass_by(int(self._before[feed.lane]))
            feeds.release(self.first_needed)

    def first_needed(self, feed: LaneFeed) -> int:
        """The first input of a lane whose chunk is still needed."""
        if self._work.gives_samples:
            return feed.done
        return feed.next_input(int(self._before[feed.lane]))

    def rest(self, position: int) -> tuple[IntArray, IntArray]:
        """The ids of all inputs beyond a position, in the lanes that this rank answers for: the dropped; and outputs.

        The lanes' ends are reached.
        """
        dropped, left = [_NO_IDS], [_NO_IDS]
        taken = self.ledger.taken_at(position)
        for lane, feed in self.feeds.feeds.items():
            if self.ledger.keeps(lane):
                after, unused = feed.after(int(taken[lane]))
                dropped.append(after)
                left.append(unused)
        return np.concatenate(dropped), np.concatenate(left)

    def end(self) -> None:
        """Stop what has begun, and let go of all chunks."""
        self.feeds.end()
        self._borrowed.end()

    # -- what others ask ------------------------------------------------------------------------------------------

    def next_uses(self) -> dict[int, int]:
        """When each chunk is used next; see ``LaneFeeds.next_uses``."""
        return self.feeds.next_uses(self.first_needed) | self._borrowed.next_uses(self.first_needed)

    @property
    def waiting(self) -> tuple[str, float] | None:
        """What the next batch waits for besides chunks, and since when."""
        return self.ledger.waiting or self.feeds.waiting or self._borrowed.waiting


def _ranges(segments: Segments) -> dict[int, tuple[int, int]]:
    """Of each lane of some segments, the first output and one past the last."""
    found: dict[int, tuple[int, int]] = {}
    for lane, start, stop in zip(
        *(each.tolist() for each in (segments.lane, segments.start, segments.stop)), strict=True
    ):
        first, last = found.get(lane, (start, stop))
        found[lane] = min(first, start), max(last, stop)
    return found
