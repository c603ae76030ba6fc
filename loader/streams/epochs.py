"""Ends of a run's epochs: one data set's are each cut into batches; a mixture's go on within the same batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ..order.mixture import Lap, is_over
from ..order.outputs import keeper_ranks, lanes_of_share
from ..order.plan import lane_turns
from .source_stream import TailRule

if TYPE_CHECKING:
    from ..columns import IntArray
    from ..order.outputs import Cursors
    from ..order.plan import Share
    from ..sampler.mixture import StreamPlace
    from .source_stream import SourceStream

_MOST_PARTS = 64  # epochs of sources that are dealt together


@dataclass(frozen=True, slots=True, kw_only=True)
class Steps:
    """Consecutive steps of an epoch of the run: their ``bounds`` (steps + 1,) in its positions.

    ``taken`` (steps + 1, sources): the outputs of the run before each, by source. ``laps`` (steps + 1): where the
    sources of a mixture are then. ``is_end``: the epoch ends with them.
    """

    epoch: int
    bounds: IntArray
    taken: IntArray
    laps: Sequence[Sequence[Lap]] | None
    is_end: bool

    def __len__(self) -> int:
        return len(self.bounds) - 1

    def apart(self) -> list[Steps]:
        """Split them into single steps."""
        return [self._cut(step) for step in range(len(self))]

    def _cut(self, step: int) -> Steps:
        both = slice(step, step + 2)
        return replace(
            self,
            bounds=self.bounds[both],
            taken=self.taken[both],
            laps=None if self.laps is None else self.laps[both],
            is_end=self.is_end and step == len(self) - 1,
        )


class Epochs(Protocol):
    """The place of a run, and the ends of its epochs. Used by the assembler thread alone.

    ``rule``: where the tails of sources' epochs begin. ``patience``: see ``LaneOptions``. ``cursors_are_exact``: what
    was taken of each lane is known where the run begins; else outputs between the cursors and there are skipped.
    """

    rule: TailRule
    patience: int
    cursors_are_exact: bool
    epoch: int
    laps: Sequence[Lap]  # where the sources are
    cursors: Sequence[Cursors]  # at which work on them begins, where the run does

    def plan(self, steps: int) -> IntArray:
        """Plan (steps + 1, sources): the outputs of the run before each of the next steps, as if no epoch ended."""

    def cut(self, taken: IntArray, streams: Mapping[int, SourceStream]) -> Steps:
        """Cut the first steps that lie in one epoch; all are settled in ``streams``."""

    def own_lanes(self, position: int, lanes: int, share: Share) -> IntArray:
        """Choose the lanes that a rank works on ahead in an epoch of a source, from a position on."""

    def pass_by(self, steps: Steps) -> None:
        """Go to the end of some steps."""


class CutEpochs:
    """Epochs of one data set, from ``position`` of ``epoch`` on: each is cut into global batches of ``size``."""

    patience = 0
    cursors_are_exact = True

    def __init__(self, size: int, epoch: int, position: int, cursors: Cursors, last_batch: str) -> None:
        self.rule = TailRule(grain=size, last_batch=last_batch)
        self.epoch = epoch
        self.laps: Sequence[Lap] = [Lap(epoch, position)]
        self.cursors: Sequence[Cursors] = [cursors]
        self._size = size
        self._here = position  # outputs of the run
        self._began = 0  # those before the epoch

    def plan(self, steps: int) -> IntArray:
        taken: IntArray = self._here + np.arange(steps + 1, dtype=np.int64)[:, None] * self._size
        return taken

    def cut(self, taken: IntArray, streams: Mapping[int, SourceStream]) -> Steps:
        stop = streams[0].stop
        if stop is not None:
            taken = np.minimum(taken, stop)
            taken = taken[: 1 + np.count_nonzero(np.diff(taken[:, 0]))]
        bounds = taken[:, 0] - self._began
        return Steps(epoch=self.epoch, bounds=bounds, taken=taken, laps=None, is_end=int(taken[-1, 0]) == stop)

    def own_lanes(self, position: int, lanes: int, share: Share) -> IntArray:
        size, rank, world_size = share.global_batch_size, share.rank, share.world_size
        return lanes_of_share(position, lane_turns(lanes), size, rank, world_size, share.weights)

    def pass_by(self, steps: Steps) -> None:
        self._here = int(steps.taken[-1, 0])
        if steps.is_end:
            self.epoch, self._began = self.epoch + 1, self._here
        self.laps = [Lap(self.epoch, self._here - self._began)]


class JoinedEpochs:
    """Epochs of a mixture, from a place on: its sources' own are laid end to end, and ``Mixture.stop`` ends its own."""

    rule = TailRule()
    patience = 16  # spans
    cursors_are_exact = False

    def __init__(self, size: int, place: StreamPlace) -> None:
        self.epoch = place.epoch
        self.laps: Sequence[Lap] = place.laps
        self.cursors: Sequence[Cursors] = place.cursors
        self._size = size
        self._plan = place.plan
        self._consumed = place.consumed
        self._here = place.here
        self._starts: Sequence[Lap] = place.starts

    def plan(self, steps: int) -> IntArray:
        return self._plan.bounds(self._here, steps)

    def cut(self, taken: IntArray, streams: Mapping[int, SourceStream]) -> Steps:
        steps = len(taken) - 1
        while steps > 1 and sum(1 for k in streams for _ in streams[k].cut(taken[: steps + 1, k])) > _MOST_PARTS:
            steps //= 2
        laps, is_end = [self.laps], False
        for step in range(1, steps + 1):
            here = taken[step].tolist()
            laps.append(tuple(streams[k].lap_at(here[k]) if k in streams else lap for k, lap in enumerate(self.laps)))
            is_end = is_over(self._plan.stop, self._starts, laps[-1], self._plan.changes[-1].weights)
            if is_end:
                break
        bounds = self._consumed + np.arange(len(laps), dtype=np.int64) * self._size
        return Steps(epoch=self.epoch, bounds=bounds, taken=taken[: len(laps)], laps=laps, is_end=is_end)

    def own_lanes(self, position: int, lanes: int, share: Share) -> IntArray:
        return np.flatnonzero(keeper_ranks(lanes, share.world_size) == share.rank)  # a step's share may be of any lanes

    def pass_by(self, steps: Steps) -> None:
        assert steps.laps is not None
        self._here = self._plan.advance(self._here, len(steps))
        self.laps, self._consumed = steps.laps[-1], int(steps.bounds[-1])
        if steps.is_end:
            self.epoch, self._consumed, self._starts = self.epoch + 1, 0, self.laps
