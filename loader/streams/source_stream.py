"""One source's endless sequence of outputs: its epochs laid end to end, as far as all ranks know them.

An epoch's order is rule 4 as long as every lane has the output that it asks for. The rest of all lanes, its
*tail*, follows lane by lane. Where the tail begins, and how much of it is taken, is a ``TailRule``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from ..errors import PartitionError, StateMismatchError
from ..order.mixture import Lap
from ..order.outputs import Cursors, Tail, fillable
from ..order.plan import count_steps, lane_offsets
from .epoch_supply import ALL_OUTPUTS, EpochSupply

if TYPE_CHECKING:
    from ..columns import IntArray

MakeEpoch = Callable[[int, int, Cursors], EpochSupply]


@dataclass(frozen=True, slots=True, kw_only=True)
class TailRule:
    """The start of an epoch's tail: the first grain, counted from the run's start, that some lane cannot fill.

    A source of a mixture has grains of 1, and all of its tail is taken: where the tail begins does not depend on
    batches, and the next epoch goes on in the same batch. A data set by itself has grains of a global batch, and
    ``last_batch`` says what becomes of the outputs that fill none; then the epoch ends.
    """

    grain: int = 1
    last_batch: str | None = None

    @property
    def ends_epochs(self) -> bool:
        """Return whether batches end where an epoch does."""
        return self.last_batch is not None

    def taken_of(self, tail: Tail) -> int:
        """Count the outputs of an epoch that are taken."""
        if self.last_batch is None:
            return tail.stop
        left = count_steps(tail.stop, tail.start, self.grain, self.last_batch)
        return min(tail.stop, tail.start + left * self.grain)


@dataclass(slots=True)
class RunningEpoch:
    """An epoch that outputs are taken of; all positions here are its own.

    It begins after ``began`` outputs of the run. Of its positions, those from ``origin`` on are taken, and ``total`` in
    all, None while that is not known. ``tail_taken`` (lanes,): where the run began within the tail, what had been taken
    of the lanes. ``is_counted``: the ends of this rank's lanes have been reached. ``reached``: the goals of the work.
    """

    supply: EpochSupply
    rule: TailRule
    began: int
    origin: int = 0
    tail_taken: IntArray | None = None
    total: int | None = None
    is_counted: bool = False
    reached: tuple[int, int] = (-1, -1)

    @property
    def stop(self) -> int | None:
        """The outputs of the run after its last one."""
        return None if self.total is None else self.began + self.total

    @property
    def tail_start(self) -> int | None:
        """The position where the tail begins; None while no lane's end is known."""
        if self.tail_taken is not None:
            return self.origin
        limit = self.supply.ledger.limit
        return None if limit is None else self._floor(limit)

    @property
    def settled(self) -> int:
        """The position up to which every rank knows the outputs taken: the next grain proves that more follows."""
        known = self._filled
        is_stuck = self._is_blocked_before(known + self.rule.grain, known)
        return known if is_stuck else known - self.rule.grain

    @property
    def _filled(self) -> int:
        """The position, in whole grains, up to which all lanes have the outputs that rule 4 asks for."""
        known, start = self._floor(self.supply.ledger.fillable), self.tail_start
        return known if start is None else min(known, start)

    def _floor(self, position: int) -> int:
        return self.origin + (position - self.origin) // self.rule.grain * self.rule.grain

    def _is_blocked_before(self, position: int, tail_start: int) -> bool:
        """Return whether an error of any rank comes before a position, or before the end of a tail from there on."""
        blocked, start = self.supply.ledger.blocked, self.tail_start
        return blocked is not None and (blocked[0] < position or (start is not None and start <= tail_start))

    def is_blocked(self, needed: int) -> bool:
        """Return whether an error keeps it from ever giving so many outputs."""
        return self.total is None and self._is_blocked_before(needed, needed - 1)

    def work(self, needed: int, ahead: int) -> None:
        """Work on this rank's lanes until the outputs taken up to ``needed`` are known, and beyond, to ``ahead``."""
        ledger, grain = self.supply.ledger, self.rule.grain
        if self.reached != (needed, ahead) and not self.is_counted and self.tail_taken is None:
            self.supply.reach(needed + grain, ahead + grain)  # one grain more tells that the epoch goes on
            self.reached = needed, ahead
        start = self.tail_start
        if start is not None and start <= needed and not self.is_counted:
            self.supply.count(self._taken_before(start), grain)
            self.is_counted = True
        if self.total is None and ledger.has_totals:
            start = self.tail_start
            assert start is not None
            is_resumed = self.tail_taken is not None
            ledger.tail = Tail(start, self._taken_before(start), ledger.totals.copy(), is_resumed)
            self.total = self.rule.taken_of(ledger.tail)

    def _taken_before(self, tail_start: int) -> IntArray:
        if self.tail_taken is not None:
            return self.tail_taken
        return lane_offsets(np.array(tail_start, np.int64), self.supply.ledger.turns)


class SourceStream:
    """The outputs of a source, counted since the run began, on one rank. Used by the assembler thread alone.

    ``make_epoch`` makes the supply of (epoch, position, cursors). ``name`` is the source's in a mixture; None: it is a
    data set by itself.
    """

    def __init__(
        self, name: str | None, make_epoch: MakeEpoch, rule: TailRule, *, lap: Lap, taken: int, cursors: Cursors
    ) -> None:
        """Start at ``cursors``, before ``lap``, up to which ``taken`` outputs of the run were taken."""
        self.name = name
        self.rate = 1.0  # outputs a step, about
        self._make_epoch = make_epoch
        self._rule = rule
        self._begins_at = taken
        first = RunningEpoch(make_epoch(lap.epoch, lap.outputs, cursors), rule, taken - lap.outputs, lap.outputs)
        if cursors.in_tail and rule.ends_epochs:
            first.tail_taken = cursors.taken
        self._epochs = deque([first])
        self._next: EpochSupply | None = None
        self._lanes = len(cursors.offsets)

    def catch_up(self, begun: IntArray, stride: int) -> None:
        """Skip the outputs between the cursors, before which are ``begun`` (lanes,), and here, in strides."""
        supply, here = self._epochs[0].supply, self._epochs[0].origin
        for position in range(fillable(begun, supply.ledger.turns) + stride, here, stride):
            if all(buffer.is_over for buffer in supply.lanes.buffers.values()):
                break
            supply.reach(position, 0)
            supply.pass_by(position)
        supply.pass_by(here)

    # -- ahead of need --------------------------------------------------------------------------------------------

    def work(self, needed: int, ahead: int) -> None:
        """Work until the source's place after ``needed`` outputs is known, and beyond, to ``ahead``.

        Does not wait for other ranks: ``look`` polls their outcomes.

        Raises:
            PartitionError: an epoch has nothing to give.
            StateMismatchError: the epoch that the run began in has less to give than was taken of it.
        """
        place = 0
        while True:
            if place == len(self._epochs):
                self._begin_next()
            running = self._epochs[place]
            was_known = running.total is not None
            running.work(needed - running.began, ahead - running.began)
            if running.total is not None and not was_known:
                self._check_total(running, running.total)
            if running.stop is None or needed <= running.stop or self._rule.ends_epochs:
                return
            place += 1

    def _check_total(self, running: RunningEpoch, total: int) -> None:
        epoch = running.supply.plan.epoch
        if not total:
            self._refuse_empty(running)
        if running is self._epochs[0] and running.began + total < self._begins_at:
            where = "the loader is" if self.name is None else f"the source {self.name!r} is"
            raise StateMismatchError(
                f"a damaged loader state, or keep=, transform= or packing= decide otherwise than in its run: {where} "
                f"at output {self._begins_at - running.began:,} of its epoch {epoch} there, which has {total:,} here"
            )

    def _refuse_empty(self, running: RunningEpoch) -> NoReturn:
        supply = running.supply
        inputs, epoch = supply.plan.num_samples, supply.plan.epoch
        if self.name is None:
            assert supply.ledger.tail is not None
            raise PartitionError(_explain_no_batch(supply, supply.ledger.tail.stop, self._rule.grain))
        what = f"keep= or transform= dropped all {inputs:,} samples of its epoch {epoch}; check what it decides by"
        if not supply.is_per_input:
            what = (
                f"no sequence was made of the {inputs:,} samples of its epoch {epoch}; check what keep=, transform= "
                "and long_documents= leave out"
            )
        raise PartitionError(
            f"the source {self.name!r} of the mixture has nothing to give: {what}, give it weight 0, or leave it out"
        )

    def _begin_next(self) -> None:
        last = self._epochs[-1]
        assert last.stop is not None
        supply, self._next = self._next or self._make_next(), None
        self._epochs.append(RunningEpoch(supply, self._rule, last.stop))

    def _make_next(self) -> EpochSupply:
        return self._make_epoch(self._epochs[-1].supply.plan.epoch + 1, 0, Cursors.at_start(self._lanes))

    def look(self) -> None:
        """Poll what other ranks have posted of the epochs that have begun."""
        for running in self._epochs:
            if running.total is None:
                running.supply.ledger.look()

    @property
    def settled(self) -> int:
        """The number of outputs of the run up to which every rank knows the source's place."""
        known = 0
        for running in self._epochs:
            if running.stop is None:
                return max(running.began, running.began + running.settled)
            known = running.stop
        return ALL_OUTPUTS if self._rule.ends_epochs else known  # no step goes beyond the epoch

    def is_blocked(self, needed: int) -> bool:
        """Return whether an error, here or on another rank, keeps the source from ever giving so many outputs."""
        return any(running.is_blocked(needed - running.began) for running in self._epochs)

    def raise_blocked(self, needed: int) -> None:
        """Raise that error, if there is one."""
        for running in self._epochs:
            if running.is_blocked(needed - running.began):
                running.supply.ledger.raise_blocked()

    @property
    def horizon(self) -> float:
        """Estimate for how many steps inputs have been requested ahead."""
        ahead = self._epochs[-1].supply.lanes.horizon + (0.0 if self._next is None else self._next.lanes.horizon)
        return ahead * self._lanes / self.rate

    def look_ahead(self) -> bool:
        """Request some more inputs, also of the next epoch; return whether there were any."""
        supply = self._next or self._epochs[-1].supply
        if not supply.lanes.is_requested:
            supply.lanes.look_ahead(1)
            return True
        if self._next is None:
            self._next = self._make_next()
            return True
        return False

    # -- what is taken --------------------------------------------------------------------------------------------

    @property
    def stop(self) -> int | None:
        """Return the number of outputs of the run at the end of its epoch; None while that is not known."""
        return self._epochs[0].stop

    def cut(self, taken: IntArray) -> Iterator[tuple[EpochSupply, IntArray]]:
        """Yield the epochs in which ``taken`` (steps + 1,) lie, all settled, with the (steps + 1,) positions there."""
        for running in self._epochs:
            most = taken[-1] - running.began if running.total is None else running.total
            local = np.clip(taken - running.began, 0, most)
            if local[-1] > local[0]:
                yield running.supply, local

    def lap_at(self, taken: int) -> Lap:
        """Find the source's lap after so many outputs of the run, which are settled."""
        for running in self._epochs:
            if running.stop is None or taken < running.stop:
                return Lap(running.supply.plan.epoch, taken - running.began)
        return Lap(self._epochs[-1].supply.plan.epoch + 1, 0)

    def ended(self, before: int, after: int) -> Iterator[tuple[EpochSupply, int]]:
        """Yield the epochs that ended between two numbers of outputs of the run, each with its outputs taken."""
        for running in self._epochs:
            if running.stop is not None and before < running.stop <= after:
                assert running.total is not None
                yield running.supply, running.total

    def pass_by(self, taken: int) -> None:
        """Drop all before so many outputs of the run, and the epochs that are over."""
        for running in list(self._epochs):
            if running.stop is None or taken < running.stop:
                running.supply.pass_by(taken - running.began)
                return
            if running is self._epochs[-1]:
                self._begin_next()
            running.supply.end()
            self._epochs.popleft()

    # -- what others ask ------------------------------------------------------------------------------------------

    def next_uses(self) -> dict[int, float]:
        """Map each chunk, by its number in the source, to its next use: estimated steps from now."""
        found: dict[int, float] = {}
        for supply in (*(running.supply for running in self._epochs), *([] if self._next is None else [self._next])):
            uses = supply.next_uses()
            here = min(uses.values(), default=0)
            for chunk, use in uses.items():
                found.setdefault(chunk, (use - here) / self.rate)
        return found

    def post_error(self, error: Exception) -> None:
        """Post to other ranks that this one stops. Called by any thread."""
        for running in list(self._epochs):
            running.supply.post_error(error)

    def describe_wait(self, needed: int) -> str | None:
        """Describe which ranks block progress to ``needed`` outputs of the run; None where enough is known."""
        if self.settled >= needed:
            return None
        running = self._epochs[-1]
        position, start = needed - running.began + self._rule.grain, running.tail_start
        if self.name is not None:
            return f"{running.supply.describe_wait(position)} of the source {self.name!r}"
        is_at_end = start is not None and start < needed - running.began
        return running.supply.describe_wait(ALL_OUTPUTS if is_at_end else position)

    @property
    def waiting(self) -> tuple[str, float] | None:
        """Describe the pending work that is waited for, and since when."""
        return next((running.supply.waiting for running in list(self._epochs) if running.supply.waiting), None)


def _explain_no_batch(supply: EpochSupply, outputs: int, size: int) -> str:
    """Explain why an epoch of a data set has no global batch of ``size``."""
    inputs, epoch, world_size = supply.plan.num_samples, supply.plan.epoch, supply.world_size
    if not supply.is_per_input:
        return (
            f"packing= made {outputs:,} sequences of the {inputs:,} samples of epoch {epoch}, which is "
            f"below a global batch of {size} (world_size={world_size}); use a smaller batch or a "
            "shorter seq_len, last_batch='pad' or 'partial', or see what long_documents= and keep= leave out"
        )
    if not outputs:
        return (
            f"keep= or transform= dropped all {inputs:,} samples of epoch {epoch}; check what it "
            "decides by, for instance on loader.dataset[0]"
        )
    return (
        f"keep= or transform= left {outputs:,} of the {inputs:,} samples of epoch {epoch}, which is "
        f"below a global batch of {size} (world_size={world_size}), and last_batch='drop' leaves "
        "nothing; use a smaller batch, or last_batch='pad' or 'partial'"
    )
