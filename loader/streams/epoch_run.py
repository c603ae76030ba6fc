"""One epoch of a data set whose samples are dropped or packed, on one rank: what lanes have is dealt in batches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ..columns import IntArray
from ..errors import LoaderClosedError, PartitionError
from ..order.cursors import Cursors
from ..order.outputs import Tail, lanes_of_share
from ..order.plan import EpochPlan, Segments, Share, batch_bounds, count_steps, rank_segments
from ..order.spans import Span
from ..pipeline.assembler import Equipment, hand_over
from ..pipeline.delivery_queue import Delivery
from ..ranks.ledger import EpochLedger
from .deal import deal, find_dropped
from .epoch_supply import ALL_OUTPUTS, EpochSupply, FeedOptions
from .feed import LaneOutputs
from .work import WindowWork


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """How the outputs of one rank are found and dealt.

    ``steps_at_once``: the most steps that are gathered together. ``is_logged``: whether a log wants to know what is
    dropped.
    """

    last_batch: str
    steps_at_once: int
    feeding: FeedOptions
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
        lanes = lanes_of_share(position, ledger.turns, self._size, share.rank, share.world_size, share.weights)
        self.supply = EpochSupply(
            plan,
            share,
            work,
            equipment,
            ledger,
            options.feeding,
            position=position,
            cursors=self._cursors,
            lanes=lanes.tolist(),
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
            bounds = batch_bounds(self._position, steps, self._size, ALL_OUTPUTS)
            if not self._deliver(bounds, self._main_segments(bounds), is_last=False):
                return None
            at_once = min(self._options.steps_at_once, 2 * at_once)

    def _agree(self, at_once: int) -> tuple[int, bool]:
        """How many steps from here on every lane can fill, and whether that is all; at least 2 unless it is.

        Raises what keeps a lane from filling the next step. If it is the one after the next, the answer is 1 step.
        """
        ledger, size = self._ledger, self._size
        goal = self._position + (at_once + 1) * size
        self.supply.reach(goal, goal + at_once * size)

        def found() -> tuple[int, bool]:
            steps = (ledger.fillable - self._position) // size
            limit = ledger.limit
            return steps, limit is not None and (limit - self._position) // size == steps

        def is_enough() -> bool:
            steps, is_end = found()
            blocked = ledger.blocked
            return steps >= 2 or is_end or (blocked is not None and blocked[0] < self._position + (steps + 1) * size)

        self.supply.wait(is_enough, self._position + 2 * size)
        steps, is_end = found()
        if not steps and not is_end:
            ledger.raise_blocked()
        return steps, is_end

    def _main_segments(self, bounds: IntArray) -> Segments:
        share = self._share
        return rank_segments(bounds, self._ledger.turns, share.rank, share.world_size, share.weights)

    # -- the end --------------------------------------------------------------------------------------------------

    def _run_end(self, main_steps: int) -> bool:
        """Find out how much is left of all lanes, deliver the last step of rule 4, then lane after lane."""
        start = self._position + main_steps * self._size
        taken = self._cursors.taken if self._cursors.in_tail else self._ledger.taken_at(start)
        bounds = batch_bounds(self._position, main_steps, self._size, ALL_OUTPUTS)
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
        self.supply.end()
        end = Delivery.end_of(self._plan.epoch, stop, stop)
        if self._options.is_logged and not (left or main_steps):  # no batch was known to be the last
            dropped, unused = self.supply.rest(stop)
            end = replace(end, dropped=dropped, left=unused)
        return self._equipment.deliver(end)

    def _count(self, taken: IntArray) -> None:
        """Find all lanes' totals, without keeping what is found beyond ``taken``."""
        self.supply.count(taken, self._size)
        self.supply.wait(lambda: self._ledger.has_totals or self._ledger.blocked is not None, ALL_OUTPUTS)
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
        self.supply.hold_from(tail.taken)
        while left:
            steps = min(left, self._options.steps_at_once)
            bounds = batch_bounds(position, steps, self._size, stop)
            segments = self._tail_segments(tail, bounds)
            self.supply.reach_parts(segments)
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
        cuts = share.cuts(np.diff(bounds))[:, share.rank : share.rank + 2]
        found: list[tuple[int, int, int, int, int]] = []
        for step, (low, high) in enumerate((cuts + bounds[:-1, None]).tolist()):
            slot = 0
            first = (low, high) if high > low else (int(bounds[step]), int(bounds[step]) + 1)
            for lane, start, end in tail.segments(*first):
                found.append((step, lane, start, end, slot))
                slot += end - start
        return Segments(*np.array(found, np.int64).T)

    # -- batches --------------------------------------------------------------------------------------------------

    def _deliver(self, bounds: IntArray, segments: Segments, *, is_last: bool) -> bool:
        """Deliver steps whose outputs are at hand; False where the pipeline is stopped."""
        sizes = self._share.cuts(np.diff(bounds))
        num_valid = sizes[:, self._share.rank + 1] - sizes[:, self._share.rank]
        row_starts = np.zeros(len(bounds), np.int64)
        np.cumsum(np.maximum(num_valid, 1), out=row_starts[1:])
        span = Span(self._plan.epoch, bounds, segments, row_starts, num_valid)
        if not self._deliver_span(span, self.supply.at_hand(segments), is_last=is_last):
            return False
        self._position = int(bounds[-1])
        self.supply.pass_by(self._position)
        self.supply.feeds.look_ahead()
        if self.supply.feeds.is_requested:
            self._read_next()
        return True

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
            if not hand_over(self._equipment, delivery, started):
                return False
            started = time.perf_counter()
        return True

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
        after, left = self.supply.rest(int(span.bounds[-1]))
        return np.concatenate([dropped, after]), left
