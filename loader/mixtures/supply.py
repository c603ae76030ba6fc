"""One source of a mixture that filters or packs some: its endless sequence of outputs, its epochs laid end to end."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import numpy as np

from ..columns import IntArray
from ..errors import PartitionError, StateMismatchError
from ..order.cursors import Cursors
from ..order.mixtures.laps import Lap
from ..order.outputs import Tail, fillable
from ..order.plan import lane_offsets
from ..streams.epoch_supply import EpochSupply

MakeEpoch = Callable[[int, int, Cursors], EpochSupply]


@dataclass(slots=True)
class Running:
    """An epoch that outputs are taken of. It begins after ``began`` outputs of the run; ``total`` None: not known yet.

    ``is_counted``: the ends of this rank's lanes have been reached. ``reached``: the goals that were worked towards.
    """

    supply: EpochSupply
    began: int
    total: int | None = None
    is_counted: bool = False
    reached: tuple[int, int] = (-1, -1)

    @property
    def stop(self) -> int | None:
        return None if self.total is None else self.began + self.total


class SourceSupply:
    """The outputs of a source, counted since the run began, on one rank. Used by the assembler thread alone.

    An epoch's order is that of rule 4 up to the first position that a lane has no output for; what is then left of all
    lanes follows lane by lane. ``make_epoch`` makes the supply of (epoch, position, cursors).
    """

    def __init__(
        self, name: str, make_epoch: MakeEpoch, *, lap: Lap, taken: int, cursors: Cursors, stride: int
    ) -> None:
        """``taken`` outputs of the run were taken up to ``lap``; work begins at ``cursors``, before it.

        What lies between is passed by, ``stride`` outputs at a time.
        """
        self.name = name
        self.rate = 1.0  # outputs a step, about
        self._lanes = len(cursors.offsets)
        self._make_epoch = make_epoch
        first = make_epoch(lap.epoch, 0, cursors)
        self._epochs = deque([Running(first, taken - lap.outputs)])
        self._next: EpochSupply | None = None
        self._begins_at = taken
        for position in range(fillable(cursors.outputs, first.ledger.turns) + stride, lap.outputs, stride):
            if all(feed.is_over for feed in first.feeds.feeds.values()):
                break
            first.reach(position, 0)
            first.pass_by(position)
        first.pass_by(lap.outputs)

    # -- ahead of need --------------------------------------------------------------------------------------------

    def work(self, needed: int, ahead: int) -> None:
        """Work towards knowing where the source is after ``needed`` outputs, and beyond, to ``ahead``.

        Does not wait for other ranks: what they find is taken in by ``look``.
        """
        place = 0
        while True:
            if place == len(self._epochs):
                self._begin_next()
            running = self._epochs[place]
            self._work_on(running, needed - running.began, ahead - running.began)
            if running.stop is None or needed <= running.stop:
                return
            place += 1

    def _work_on(self, running: Running, needed: int, ahead: int) -> None:
        ledger = running.supply.ledger
        if running.reached != (needed, ahead) and not running.is_counted:
            running.supply.reach(needed + 1, ahead)  # one more tells that the epoch goes on
            running.reached = needed, ahead
        limit = ledger.limit
        if limit is not None and limit <= needed and not running.is_counted:
            running.supply.count(lane_offsets(np.array(limit, np.int64), ledger.turns), 1)
            running.is_counted = True
        if running.total is None and ledger.has_totals:
            limit = ledger.limit
            assert limit is not None
            taken = lane_offsets(np.array(limit, np.int64), ledger.turns)
            ledger.tail = Tail(limit, taken, ledger.totals.copy())
            running.total = ledger.tail.stop
            if not running.total:
                self._refuse_empty(running.supply)
            if running is self._epochs[0] and running.began + running.total < self._begins_at:
                raise StateMismatchError(
                    f"a damaged loader state, or keep=, transform= or packing= decide otherwise than in its run: the "
                    f"source {self.name!r} is at output {self._begins_at - running.began:,} of its epoch "
                    f"{running.supply.plan.epoch} there, which has {running.total:,} here"
                )

    def _refuse_empty(self, supply: EpochSupply) -> NoReturn:
        inputs, epoch = supply.plan.num_samples, supply.plan.epoch
        what = f"keep= or transform= dropped all {inputs:,} samples of its epoch {epoch}; check what it decides by"
        if not supply.one_each:
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
        self._epochs.append(Running(supply, last.stop))

    def _make_next(self) -> EpochSupply:
        return self._make_epoch(self._epochs[-1].supply.plan.epoch + 1, 0, Cursors.at_start(self._lanes))

    def look(self) -> None:
        """Take in what other ranks have told of the epochs that have begun."""
        for running in self._epochs:
            if running.total is None:
                running.supply.ledger.look()

    @property
    def settled(self) -> int:
        """After how many outputs of the run, at most, it is known on every rank where the source is."""
        known = 0
        for running in self._epochs:
            if running.stop is None:
                ledger = running.supply.ledger
                return max(running.began, running.began + ledger.fillable - (not _is_stuck(running)))
            known = running.stop
        return known

    def is_blocked(self, needed: int) -> bool:
        """Whether an error, here or on another rank, keeps the source from ever giving so many outputs of the run."""
        return any(_blocks(running, needed - running.began) for running in self._epochs)

    def raise_blocked(self, needed: int) -> None:
        """Raise that error, if there is one."""
        for running in self._epochs:
            if _blocks(running, needed - running.began):
                running.supply.ledger.raise_blocked()

    @property
    def horizon(self) -> float:
        """For how many steps inputs have been requested ahead, about."""
        ahead = self._epochs[-1].supply.feeds.horizon + (0.0 if self._next is None else self._next.feeds.horizon)
        return ahead * self._lanes / self.rate

    def look_ahead(self) -> bool:
        """Request some inputs more, also of the next epoch; whether there were any to be requested."""
        running = self._next or self._epochs[-1].supply
        if not running.feeds.is_requested:
            running.feeds.look_ahead(1)
            return True
        if self._next is None:
            self._next = self._make_next()
            return True
        return False

    # -- what is taken --------------------------------------------------------------------------------------------

    def cut(self, taken: IntArray) -> Iterator[tuple[EpochSupply, IntArray]]:
        """The epochs in which ``taken`` (steps + 1,) lie, all settled: each with its (steps + 1,) positions in it."""
        for running in self._epochs:
            most = taken[-1] - running.began if running.total is None else running.total
            local = np.clip(taken - running.began, 0, most)
            if local[-1] > local[0]:
                yield running.supply, local

    def lap_at(self, taken: int) -> Lap:
        """Where the source is after so many outputs of the run, which are settled."""
        for running in self._epochs:
            if running.stop is None or taken < running.stop:
                return Lap(running.supply.plan.epoch, taken - running.began)
        return Lap(self._epochs[-1].supply.plan.epoch + 1, 0)

    def ended(self, before: int, after: int) -> Iterator[tuple[EpochSupply, int]]:
        """The epochs that ended between two numbers of outputs of the run, and their totals."""
        for running in self._epochs:
            if running.stop is not None and before < running.stop <= after:
                assert running.total is not None
                yield running.supply, running.total

    def pass_by(self, taken: int) -> None:
        """Drop what comes before so many outputs of the run, and epochs that are over."""
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
        """When each chunk, by its number in the source, is used next: in steps from now, about."""
        found: dict[int, float] = {}
        for supply in (*(running.supply for running in self._epochs), *([] if self._next is None else [self._next])):
            uses = supply.next_uses()
            here = min(uses.values(), default=0)
            for chunk, use in uses.items():
                found.setdefault(chunk, (use - here) / self.rate)
        return found

    def tell_error(self, error: Exception) -> None:
        """Tell other ranks that this one does not go on. Called by any thread."""
        for running in list(self._epochs):
            running.supply.tell_error(error)

    def describe_wait(self, needed: int) -> str | None:
        """Whom this rank waits for, who needs so many outputs of the run; None where it knows enough."""
        if self.settled >= needed:
            return None
        running = self._epochs[-1]
        return f"{running.supply.describe_wait(needed - running.began + 1)} of the source {self.name!r}"

    @property
    def waiting(self) -> tuple[str, float] | None:
        """What work that has begun is waited for, and since when."""
        return next((running.supply.waiting for running in self._epochs if running.supply.waiting), None)


def _is_stuck(running: Running) -> bool:
    """Whether an error keeps the epoch from going on beyond what is fillable."""
    ledger = running.supply.ledger
    blocked, limit = ledger.blocked, ledger.limit
    known = ledger.fillable
    return blocked is not None and (blocked[0] <= known or (limit is not None and limit <= known))


def _blocks(running: Running, needed: int) -> bool:
    blocked, limit = running.supply.ledger.blocked, running.supply.ledger.limit
    if running.total is not None or blocked is None:
        return False
    return blocked[0] < needed or (limit is not None and limit < needed)
