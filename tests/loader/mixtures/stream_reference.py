"""Mixtures of sources that filter or pack, told by one output after another: slow, in one process, for reading."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from streams_reference import lanes_of_ids

from penstock.loader.order.mixture import to_shares
from penstock.loader.order.plan import EpochPlan, Order

Output = Any  # what can be sorted and compared: a sample id, or the tokens of a sequence
Yields = Callable[[list[int]], list[Output]]  # from a lane's sample ids, in order, to its outputs


def order_of_epoch(lanes: Sequence[list[Output]], turns: Sequence[int]) -> list[Output]:
    """All outputs of an epoch: position p is the next of the lane whose turn is p mod L, until that one has none left;
    then what is left, lane by lane."""
    left = [list(lane) for lane in lanes]
    lane_of_turn = {turn: lane for lane, turn in enumerate(turns)}
    outputs: list[Output] = []
    while left[lane_of_turn[len(outputs) % len(lanes)]]:
        outputs.append(left[lane_of_turn[len(outputs) % len(lanes)]].pop(0))
    return outputs + [output for lane in left for output in lane]


@dataclass
class EndlessSource:
    """A source's outputs, epoch after epoch, in the order that a state of the run tells."""

    chunk_samples: Any
    order: Order
    yields: Yields
    epoch: int = 0
    taken: int = 0  # of the epoch; less than it has

    def __post_init__(self) -> None:
        self._epochs: dict[int, list[Output]] = {}

    def of_epoch(self, epoch: int) -> list[Output]:
        if epoch not in self._epochs:
            plan = EpochPlan(self.chunk_samples, self.order, epoch)
            lanes = [self.yields(lane) for lane in lanes_of_ids(plan)]
            self._epochs[epoch] = order_of_epoch(lanes, plan.turns.tolist())
        return self._epochs[epoch]

    def __next__(self) -> Output:
        output = self.of_epoch(self.epoch)[self.taken]
        self.taken += 1
        if self.taken == len(self.of_epoch(self.epoch)):
            self.epoch, self.taken = self.epoch + 1, 0
        return output

    def has_come_round(self, since: tuple[int, int]) -> bool:
        """Whether it is again where it was at (epoch, outputs), an epoch later."""
        return (self.epoch, self.taken) >= (since[0] + 1, since[1])


def batches(
    sources: Sequence[EndlessSource], legs: Iterator[tuple[Sequence[float], int]], stop: str
) -> Iterator[tuple[int, list[tuple[int, Output]]]]:
    """The mixture's epoch and the global batch, sorted, of each step; ``legs`` are the weights and sizes in turn."""
    epoch, starts = 0, [(0, 0) for _ in sources]
    for step, (weights, size) in enumerate(legs):
        counts = counts_of(step, weights, size)
        yield epoch, sorted((k, next(sources[k])) for k, count in enumerate(counts) for _ in range(count))
        round_ = [source.has_come_round(start) for source, start in zip(sources, starts, strict=True)]
        lasting = [done for done, weight in zip(round_, weights, strict=True) if weight]
        if (stop == "first_exhausted" and any(round_)) or (stop == "all_exhausted" and all(lasting)):
            epoch, starts = epoch + 1, [(source.epoch, source.taken) for source in sources]


def counts_of(step: int, weights: Sequence[float], size: int) -> list[int]:
    """How many outputs of each source a step has: a systematic sample of the weights, in parts of 2**-32."""
    edges = [0, *itertools.accumulate(to_shares(weights))]
    mark = step * 2654435769 % (1 << 32)
    return [int(n) for n in np.diff([(size * edge + mark) >> 32 for edge in edges])]
