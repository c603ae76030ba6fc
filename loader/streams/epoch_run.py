"""One epoch of a stream on one rank: lanes are worked on, all ranks agree on how far they reach, batches are dealt."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..columns import IntArray
from ..errors import LoaderClosedError, PartitionError
from ..order.cursors import Cursors
from ..order.outputs import Tail, lanes_of_share
from ..order.plan import EpochPlan, Segments, Share, batch_bounds, count_steps, rank_segments, share_bounds
from ..order.spans import Span
from ..pipeline.assembler import Equipment
from ..pipeline.delivery_queue import Delivery
from .deal import deal, find_dropped
from .feed import LaneFeed, LaneOutputs, Room
from .feeds import LaneFeeds
from .ledger import EpochLedger
from .work import WindowWork

_NO_IDS: IntArray = np.empty(0, np.int64)
_ALL = 1 << 62  # more outputs than a lane can have


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How the outputs of one rank are found and dealt.

    ``steps_at_once``: the most steps that are gathered together. ``spacing``, ``round_rows``: see ``LaneFeeds``.
    ``is_logged``: whether a log wants to know what is dropped.
    """

    last_batch: str
    steps_at_once: int
    spacing: int
    round_rows: int
    is_logged: bool


class EpochRun:
    """Delivers an epoch from a position on. Used by the assembler thread alone."""

    def __init__(
        self,
        plan: EpochPlan,
        share: Share,
        work: WindowWork,
        equipment: Equipment,
        ledger: EpochLedger,
        options: StreamOptions,
        *,
        position: int,
        cursors: Cursors | None,
        read_next: Callable[[], None],
    ) -> None:
        self.epoch = plan.epoch
        self._read_next = read_next
        self._plan = plan
        self._share = share
        self._size = share.global_batch_size
        self._work = work
        self._equipment = equipment
        self._ledger = ledger
        self._options = options
        self._start = self._position = position
        self._cursors = Cursors.at_start(plan.order.lanes) if cursors is None else cursors
        ledger.begin_at(self._cursors)
        self.feeds = self._make_feeds(ledger)
        lanes = lanes_of_share(position, ledger.turns, self._size, share.rank, share.world_size, share.weights)
        for lane in lanes.tolist():
            self.feeds.add(lane, int(self._cursors.offsets[lane]), int(self._cursors.outputs[lane]))
        self._tail_feeds = self._make_feeds(None)
        self._held: dict[int, LaneFeed] = {}  # of the tail, the lanes that need not be worked on again
        self._told: set[int] = set()  # lanes of which other ranks know that they failed

    def _make_feeds(self, ledger: EpochLedger | None) -> LaneFeeds:
        options = self._options
        return LaneFeeds(
            self._plan,
            self._share,
            self._work,
            self._equipment,
            spacing=options.spacing,
            round_rows=options.round_rows,
            ledger=ledger,
        )

    def run(self) -> bool:
        """Deliver all batches from here on, and the epoch's end; False where the pipeline is stopped."""
        steps = 0
        if not self._cursors.in_tail:
            found = self._run_main()
            if found is None:
                return False
            steps = found
        return self._run_end(steps)

    # -- as long as every lane has outputs ------------------------------------------------------------------------

    def _run_main(self) -> int | None:
        """Deliver what lanes have in turn, less the last step, of which it is not known whether others follow.

        Returns the number of steps that are left of rule 4: 0 or 1; None where the pipeline is stopped.
        """
        at_once = 1  # so that the first batch does not wait for others
        while True:
            steps, is_end = self._agree(at_once)
            if is_end and steps <= 1:
                return steps
            steps = min(at_once, max(1, steps - 1))
            bounds = batch_bounds(self._position, steps, self._size, _ALL)
            if not self._deliver(bounds, self._main_segments(bounds), is_last=False):
                return None
            at_once = min(self._options.steps_at_once, 2 * at_once)

    def _agree(self, at_once: int) -> tuple[int, bool]:
        """How many steps from here on every lane can fill, and whether that is all; at least 2 unless it is.

        Raises what keeps a lane from filling the next step. If it is the one after the next, the answer is 1 step.
        """
        ledger, size = self._ledger, self._size
        goal = self._position + (at_once + 1) * size
        self._reach(goal, goal + at_once * size)

        def found() -> tuple[int, bool]:
            steps = (ledger.fillable - self._position) // size
            limit = ledger.limit
            return steps, limit is not None and (limit - self._position) // size == steps

        def is_enough() -> bool:
            steps, is_end = found()
            blocked = ledger.blocked
            return steps >= 2 or is_end or (blocked is not None and blocked[0] < self._position + (steps + 1) * size)

        self._wait(is_enough, self._position + 2 * size)
        steps, is_end = found()
        if not steps and not is_end:
            ledger.raise_blocked()
        return steps, is_end

    def _reach(self, goal: int, ahead: int) -> None:
        targets, beyond = (dict(enumerate(self._ledger.taken_at(each).tolist())) for each in (goal, ahead))
        lanes = self.feeds.feeds
        self._timed_reach(self.feeds, {lane: targets[lane] for lane in lanes}, {lane: beyond[lane] for lane in lanes})
        self._tell()

    def _timed_reach(self, feeds: LaneFeeds, targets: dict[int, int], ahead: dict[int, int]) -> None:
        counters = self._equipment.counters
        waited, started = counters.totals().chunk_wait_s, time.perf_counter()
        feeds.reach(targets, ahead)
        waited = counters.totals().chunk_wait_s - waited
        counters.add(since=started, assemble_s=max(0.0, time.perf_counter() - started - waited))

    def _tell(self) -> None:
        """Tell other ranks what was found here, and what failed."""
        self._ledger.post()
        for lane, feed in self.feeds.feeds.items():
            if feed.failed is not None and lane not in self._told:
                self._told.add(lane)
                self._ledger.fail(lane, feed.found, feed.failed)

    def tell_error(self, error: Exception) -> None:
        """Tell other ranks that this one does not go on, beyond what they know of its lanes. Called by any thread."""
        if error is self._ledger.raised:
            return  # they know
        self._ledger.post_error(list(self.feeds.feeds), error)

    def _wait(self, is_enough: Callable[[], bool], position: int) -> None:
        ranks = ", ".join(map(str, self._ledger.ranks_behind(position)))
        what = f"what rank {ranks} keeps of its lanes, in epoch {self._plan.epoch} before position {position}"
        self._ledger.wait(is_enough, what, self._equipment.stopping.is_set)

    def _main_segments(self, bounds: IntArray) -> Segments:
        share = self._share
        return rank_segments(bounds, self._ledger.turns, share.rank, share.world_size, share.weights)

    # -- the end --------------------------------------------------------------------------------------------------

    def _run_end(self, main_steps: int) -> bool:
        """Find out how much is left of all lanes, deliver the last step of rule 4, then lane after lane."""
        start = self._position + main_steps * self._size
        taken = self._cursors.taken if self._cursors.in_tail else self._ledger.taken_at(start)
        bounds = batch_bounds(self._position, main_steps, self._size, _ALL)
        try:
            self._count(taken)
        except LoaderClosedError:
            raise
        except Exception:
            if main_steps and not self._deliver(bounds, self._main_segments(bounds), is_last=False):
                return False
            raise
        tail = self._ledger.tail = Tail(start, taken, self._ledger.totals.copy(), self._cursors.in_tail)
        left = count_steps(tail.stop, start, self._size, self._options.last_batch)
        if not (left or main_steps or self._start):
            raise self._nothing_left(tail.stop)
        stop = min(tail.stop, start + left * self._size)
        if main_steps and not self._deliver(bounds, self._main_segments(bounds), is_last=not left):
            return False
        if not self._run_tail(tail, left, stop):
            return False
        self.feeds.end()
        self._tail_feeds.end()
        end = Delivery(self._plan.epoch, stop, stop, _NO_IDS, 0, None)
        if self._options.is_logged and not (left or main_steps):  # no batch was known to be the last
            dropped, unused = self._rest(stop)
            end = replace(end, dropped=dropped, left=unused)
        return self._equipment.deliver(end)

    def _count(self, taken: IntArray) -> None:
        """Find all lanes' totals, without keeping what is found beyond ``taken``."""
        room = Room(self._equipment.options.batch_budget_bytes)
        for lane, feed in self.feeds.feeds.items():
            feed.count_from(int(taken[lane]), self._size, room)
        everything = dict.fromkeys(self.feeds.feeds, _ALL)
        self._timed_reach(self.feeds, everything, everything)
        self._tell()
        self._wait(lambda: self._ledger.has_totals or self._ledger.blocked is not None, _ALL)
        if not self._ledger.has_totals:
            self._ledger.raise_blocked()

    def _nothing_left(self, outputs: int) -> PartitionError:
        inputs = self._plan.num_samples
        if not self._work.one_each:
            return PartitionError(
                f"packing= made {outputs:,} sequences of the {inputs:,} samples of epoch {self._plan.epoch}, which is "
                f"below a global batch of {self._size} (world_size={self._share.world_size}); use a smaller batch or a "
                "shorter seq_len, last_batch='pad' or 'partial', or see what long_documents= and keep= leave out"
            )
        if not outputs:
            return PartitionError(
                f"keep= or transform= dropped all {inputs:,} samples of epoch {self._plan.epoch}; check what it "
                "decides by, for instance on loader.dataset[0]"
            )
        return PartitionError(
            f"keep= or transform= left {outputs:,} of the {inputs:,} samples of epoch {self._plan.epoch}, which is "
            f"below a global batch of {self._size} (world_size={self._share.world_size}), and last_batch='drop' leaves "
            "nothing; use a smaller batch, or last_batch='pad' or 'partial'"
        )

    def _run_tail(self, tail: Tail, left: int, stop: int) -> bool:
        position = tail.start
        self._held = {lane: feed for lane, feed in self.feeds.feeds.items() if feed.holds_from(int(tail.taken[lane]))}
        self.feeds.release(lambda feed: self.first_needed(feed) if feed.lane in self._held else feed.size)
        while left:
            steps = min(left, self._options.steps_at_once)
            bounds = batch_bounds(position, steps, self._size, stop)
            segments = self._tail_segments(tail, bounds)
            self._reach_tail(segments)
            if self._equipment.stopping.is_set():
                return False
            left -= steps
            if not self._deliver(bounds, segments, is_last=not left):
                return False
            position = int(bounds[-1])
        return True

    def _tail_segments(self, tail: Tail, bounds: IntArray) -> Segments:
        """This rank's part of some steps of the tail; of a step without any, the step's first output."""
        share = self._share
        cuts = share_bounds(np.diff(bounds), share.world_size, share.weights)[:, share.rank : share.rank + 2]
        found: list[tuple[int, int, int, int, int]] = []
        for step, (low, high) in enumerate((cuts + bounds[:-1, None]).tolist()):
            slot = 0
            first = (low, high) if high > low else (int(bounds[step]), int(bounds[step]) + 1)
            for lane, start, end in tail.segments(*first):
                found.append((step, lane, start, end, slot))
                slot += end - start
        return Segments(*np.array(found, np.int64).T)

    def _reach_tail(self, segments: Segments) -> None:
        """Work on the lanes of the segments, from the last anchors before them on."""
        feeds, targets = self._tail_feeds, {}
        for lane, start, stop in zip(
            *(each.tolist() for each in (segments.lane, segments.start, segments.stop)), strict=True
        ):
            if lane in self._held:
                continue
            if lane not in targets:  # else it is a later part of a lane that is worked on from an earlier one on
                feed = feeds.feeds.get(lane)
                offset, outputs = self._ledger.anchor_before(lane, start)
                if feed is None or feed.asked < offset:
                    feeds.add(lane, offset, outputs)
            targets[lane] = stop
        for lane in [lane for lane in feeds.feeds if lane not in targets]:
            feeds.drop(lane)
        self._timed_reach(feeds, targets, targets)
        for feed in feeds.feeds.values():
            if feed.failed is not None and feed.found < targets[feed.lane]:
                raise feed.failed

    # -- batches --------------------------------------------------------------------------------------------------

    def _deliver(self, bounds: IntArray, segments: Segments, *, is_last: bool) -> bool:
        """Deliver steps whose outputs are at hand; False where the pipeline is stopped."""
        sizes = share_bounds(np.diff(bounds), self._share.world_size, self._share.weights)
        num_valid = sizes[:, self._share.rank + 1] - sizes[:, self._share.rank]
        row_starts = np.zeros(len(bounds), np.int64)
        np.cumsum(np.maximum(num_valid, 1), out=row_starts[1:])
        span = Span(self._plan.epoch, bounds, segments, row_starts, num_valid)
        lanes = np.unique(segments.lane).tolist()
        at_hand = {lane: (self._tail_feeds.feeds.get(lane) or self.feeds.feeds[lane]).outputs() for lane in lanes}
        if not self._deliver_span(span, at_hand, is_last=is_last):
            return False
        self._position = int(bounds[-1])
        taken = self._ledger.taken_at(self._position)
        for feeds in (self.feeds, self._tail_feeds):
            for feed in feeds.feeds.values():
                feed.pass_by(int(taken[feed.lane]))
            feeds.release(self.first_needed)
        self.feeds.look_ahead()
        if self.feeds.is_requested:
            self._read_next()
        return True

    def first_needed(self, feed: LaneFeed) -> int:
        """The first input of a lane whose chunk is still needed."""
        if self._work.gives_samples:
            return feed.done
        return feed.next_input(int(self._ledger.taken_at(self._position)[feed.lane]))

    def _deliver_span(self, span: Span, at_hand: dict[int, LaneOutputs], *, is_last: bool) -> bool:
        started, waited = time.perf_counter(), self._equipment.counters.totals().chunk_wait_s
        try:
            dealt = deal(span, at_hand, self._work, self._equipment.maker, self._share)
        except Exception:
            if span.steps == 1 or self._equipment.stopping.is_set():
                raise
            return all(
                self._deliver_span(span.cut(step), at_hand, is_last=is_last and step == span.steps - 1)
                for step in range(span.steps)
            )
        waited = self._equipment.counters.totals().chunk_wait_s - waited
        busy = max(0.0, time.perf_counter() - started - waited)
        self._equipment.counters.add(since=started, assemble_s=busy, spans=1)
        started = time.perf_counter()
        for step, (batch, ids, nbytes) in enumerate(dealt):
            is_end = is_last and step == span.steps - 1
            dropped, left = self._account(span, step, at_hand, is_last=is_end)
            delivery = Delivery(
                epoch=span.epoch,
                start=int(span.bounds[step]),
                stop=int(span.bounds[step + 1]),
                ids=ids,
                nbytes=nbytes,
                batch=batch,
                dropped=dropped,
                left=left,
                is_last=is_end,
            )
            if not self._equipment.deliver(delivery):
                delivery.batch.cancel()
                return False
        self._equipment.counters.add(backpressure_s=time.perf_counter() - started)
        return True

    # -- what others ask ------------------------------------------------------------------------------------------

    def next_uses(self) -> dict[int, int]:
        """When each chunk is used next; see ``LaneFeeds.next_uses``."""
        return self.feeds.next_uses(self.first_needed) | self._tail_feeds.next_uses(self.first_needed)

    @property
    def waiting(self) -> tuple[str, float] | None:
        """What the next batch waits for besides chunks, and since when."""
        return self._ledger.waiting or self.feeds.waiting or self._tail_feeds.waiting

    # -- what was not delivered -----------------------------------------------------------------------------------

    def _account(
        self, span: Span, step: int, at_hand: dict[int, LaneOutputs], *, is_last: bool
    ) -> tuple[IntArray | None, IntArray | None]:
        """The ids dropped on the way to this rank's outputs of a step, and at an epoch's end those that are left."""
        if not self._options.is_logged:
            return None, None
        dropped = find_dropped(span, step, at_hand)
        if not is_last:
            return dropped, None
        after, left = self._rest(int(span.bounds[-1]))
        return np.concatenate([dropped, after]), left

    def _rest(self, position: int) -> tuple[IntArray, IntArray]:
        """The ids of all inputs beyond an epoch's last batch, in the lanes that this rank answers for; and outputs."""
        dropped, left = [_NO_IDS], [_NO_IDS]
        taken = self._ledger.taken_at(position)
        for lane, feed in self.feeds.feeds.items():
            if self._ledger.keeps(lane):
                after, unused = feed.after(int(taken[lane]))
                dropped.append(after)
                left.append(unused)
        return np.concatenate(dropped), np.concatenate(left)
