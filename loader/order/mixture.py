"""Mixtures: how many samples each source gives to each global batch, and where a run of them ends an epoch.

A source's samples form one endless sequence, its epochs laid end to end. A step takes the next few of each source, so
that a source continues where it was, however weights change, and comes exactly once in each of its own epochs.

How many is systematic sampling (Madow 1949): with shares w_k of a batch of G samples and their running sums W_k, source
k gets floor(G W_k + u) - floor(G W_(k-1) + u), which is G w_k rounded down or up, whatever u is. Step i has u =
frac(i / golden ratio), whose values fill the unit interval evenly (Weyl 1916), so any stretch of steps has each
source's share to within a few samples. All of it is whole numbers of 2**-32, to which shares are rounded: 7 of 10
samples are 6 in a step now and then. Sums over steps are closed forms."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Literal

import numpy as np

from ..errors import ConfigError, PartitionError
from .cached import cached_property

if TYPE_CHECKING:
    from .permutation import IntArray


Stop = Literal["first_exhausted", "all_exhausted", "never"]

_BITS = 32
_ONE = 1 << _BITS
_GOLDEN = 2654435769  # 2**32 / golden ratio, odd
MOST_BATCH = 1 << 29  # so that a batch's shares, in units of 2**-32, are exact in int64
_MOST_STEPS = 1 << 60
MOST_SAMPLES = 1 << 62  # of a run


def to_shares(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in proportion to non-negative weights, (sources,), with the sum 2**32.

    Each differs from its exact value by less than one (largest remainders), but is at least 1 where its weight is
    positive.
    """
    exact = [Fraction(weight) for weight in weights]
    total = sum(exact)
    ideal = [weight * _ONE / total for weight in exact]
    shares = [max(math.floor(share), int(share > 0)) for share in ideal]
    left = _ONE - sum(shares)
    by_remainder = sorted(range(len(shares)), key=lambda k: (math.floor(ideal[k]) - ideal[k], k))
    for k in by_remainder[: max(0, left)]:
        shares[k] += 1
    if left < 0:  # tiny weights took their 1
        shares[max(range(len(shares)), key=shares.__getitem__)] += left
    return tuple(shares)


@dataclass(frozen=True, slots=True)
class WeightChange:
    """From the first step at or after ``position``, counted in samples of the run, sources have these weights."""

    position: int
    weights: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a run of a mixture: samples and steps handed out before it, and the samples ``taken`` of each source.

    ``steps`` only selects the rounding of a step's counts, so it may keep counting when batch sizes or weights change.
    """

    position: int
    steps: int
    taken: tuple[int, ...]

    @staticmethod
    def begin(num_sources: int) -> Cursor:
        return Cursor(0, 0, (0,) * num_sources)


@dataclass(frozen=True)
class MixturePlan:
    """A mixture of sources of ``sizes`` samples, taken in global batches of one size.

    ``changes`` are in the order of their positions, of which the first is 0. With ``stratified``, weights are whole
    numbers of samples in a batch, or in a part of a batch where that is a multiple of their sum.

    Raises:
        PartitionError: the batch is too large, or no multiple of the weights' sum where they are ``stratified``.
    """

    sizes: tuple[int, ...]
    global_batch_size: int
    changes: tuple[WeightChange, ...]
    stop: Stop = "first_exhausted"
    stratified: bool = False

    def __post_init__(self) -> None:
        if self.global_batch_size > MOST_BATCH:
            raise PartitionError(f"a global batch of {self.global_batch_size}: a mixture's is at most {MOST_BATCH}")
        for change in self.changes if self.stratified else ():
            total = int(sum(change.weights))
            if self.global_batch_size % total:
                nearest = -(-self.global_batch_size // total) * total
                raise PartitionError(
                    f"stratified: {' + '.join(f'{weight:g}' for weight in change.weights)} = {total} samples do not "
                    f"divide a global batch of {self.global_batch_size}; use global_batch_size={nearest}, or other "
                    "numbers of samples"
                )

    @property
    def num_sources(self) -> int:
        return len(self.sizes)

    @cached_property
    def _edges(self) -> list[list[int]]:
        """Of each change, the running sums of a batch's shares in units of 2**-32: sources + 1 each."""
        found = []
        for change in self.changes:
            if self.stratified:
                times = self.global_batch_size // int(sum(change.weights))
                sizes = [int(weight) * times * _ONE for weight in change.weights]
            else:
                sizes = [share * self.global_batch_size for share in to_shares(change.weights)]
            found.append([sum(sizes[:k]) for k in range(len(sizes) + 1)])
        return found

    def _stretch(self, position: int) -> tuple[int, int]:
        """The change in force at a position, and how many steps from there on it stays so."""
        index = max(i for i, change in enumerate(self.changes) if change.position <= position)
        if index + 1 == len(self.changes):
            return index, _MOST_STEPS
        return index, -(-(self.changes[index + 1].position - position) // self.global_batch_size)

    def bounds(self, cursor: Cursor, steps: int) -> IntArray:
        """(steps + 1, sources) int64: how many samples of each source are taken before each step and after the last."""
        found = np.empty((steps + 1, self.num_sources), np.int64)
        found[0] = cursor.taken
        position, done = cursor.position, 0
        while done < steps:
            index, until = self._stretch(position)
            count = min(steps - done, until)
            first = cursor.steps + done
            marks = np.arange(first, first + count, dtype=np.uint64) * np.uint64(_GOLDEN) & np.uint64(_ONE - 1)
            edges = (np.array(self._edges[index], np.int64) + marks.astype(np.int64)[:, None]) >> _BITS
            found[done + 1 : done + count + 1] = np.diff(edges, axis=1)
            position, done = position + count * self.global_batch_size, done + count
        counted: IntArray = np.cumsum(found, axis=0)
        return counted

    def advance(self, cursor: Cursor, steps: int) -> Cursor:
        """The cursor ``steps`` steps further on; the same as the last row of ``bounds``, in O(changes * sources)."""
        while steps:
            index, until = self._stretch(cursor.position)
            count = min(steps, until)
            sums = [_sum_edges(edge, cursor.steps, cursor.steps + count) for edge in self._edges[index]]
            taken = tuple(t + high - low for t, low, high in zip(cursor.taken, sums, sums[1:], strict=False))
            cursor = Cursor(cursor.position + count * self.global_batch_size, cursor.steps + count, taken)
            steps -= count
        return cursor

    def steps_left(self, start: Cursor, here: Cursor) -> int | None:
        """Count the steps that are left at ``here`` of an epoch that began at ``start``; None if it never ends.

        The last step of a run's first epoch is that by which the first source (or, "all_exhausted", each source that
        has a weight to the end) has given as many samples as it has. While weights stay as they are all epochs have as
        many samples; one in which they change ends as the first does, by what was given since ``start``.
        """
        if self.stop == "never":
            return None
        index, until = self._stretch(start.position)
        if until < _MOST_STEPS:
            return self._count_until_over(start, here)
        steps = self._steps_of_first(index)
        return max(0, steps - (here.position - start.position) // self.global_batch_size)

    def _steps_of_first(self, index: int) -> int:
        if index not in self._firsts:
            alone = replace(self, changes=(replace(self.changes[index], position=0),))
            begin = Cursor.begin(self.num_sources)
            self._firsts[index] = alone._count_until_over(begin, begin)
        return self._firsts[index]

    @cached_property
    def _firsts(self) -> dict[int, int]:
        return {}

    def _count_until_over(self, start: Cursor, here: Cursor) -> int:
        targets = [taken + size for taken, size in zip(start.taken, self.sizes, strict=True)]
        lasting = [k for k, weight in enumerate(self.changes[-1].weights) if weight]

        def is_over(steps: int) -> bool:
            taken = self.advance(here, steps).taken
            if self.stop == "first_exhausted":
                return any(count >= target for count, target in zip(taken, targets, strict=True))
            return all(taken[k] >= targets[k] for k in lasting)

        return _first_true(is_over)

    def change_weights(self, position: int, weights: Sequence[float]) -> MixturePlan:
        """The same plan with other weights from ``position`` on; what was to change later is dropped."""
        kept = tuple(change for change in self.changes if change.position < position)
        return replace(self, changes=(*kept, WeightChange(position, tuple(weights))))

    def forget_before(self, position: int) -> MixturePlan:
        """The same plan from ``position`` on, without the changes that are over there."""
        index, _ = self._stretch(position)
        return replace(self, changes=self.changes[index:])


def _sum_edges(edge: int, first: int, stop: int) -> int:
    """The sum over steps i from ``first`` to ``stop`` of (edge + i * _GOLDEN mod 2**32) >> 32."""
    whole, fraction = divmod(edge, _ONE)
    crossings = [
        floor_sum(n, _ONE, _GOLDEN, fraction) - floor_sum(n, _ONE, _GOLDEN, 0) if fraction else 0 for n in (first, stop)
    ]
    return (stop - first) * whole + crossings[1] - crossings[0]


def floor_sum(count: int, divisor: int, slope: int, offset: int) -> int:
    """The sum of (slope * i + offset) // divisor for i in range(count), of non-negative numbers: O(log divisor).

    Counts lattice points below a line by Euclid's algorithm, turning the axes at each division (Graham, Knuth and
    Patashnik, Concrete Mathematics, 3.5).
    """
    total = 0
    while count:
        total += count * (count - 1) // 2 * (slope // divisor) + count * (offset // divisor)
        slope, offset = slope % divisor, offset % divisor
        top = slope * count + offset
        if top < divisor:
            break
        count, offset = divmod(top, divisor)
        divisor, slope = slope, divisor
    return total


def _first_true(holds: Callable[[int], bool]) -> int:
    """The smallest number from 0 on for which a condition holds that then stays true."""
    high = 1
    if holds(0):
        return 0
    while not holds(high):
        high *= 2
        if high > _MOST_STEPS:
            raise ConfigError("an epoch of this mixture has more steps than can be counted; raise the smallest weight")
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


@dataclass(frozen=True, slots=True, order=True)
class Lap:
    """Position in a source: ``outputs`` of ``epoch`` have been taken; at the epoch's end it is 0 of the next one.

    Its endless sequence is its epochs laid end to end, each in the order of ``outputs.py``, whose tail begins with the
    first position that a lane cannot fill. So a lap names the same place whatever the batches were that led there.
    """

    epoch: int = 0
    outputs: int = 0


def has_come_round(start: Lap, here: Lap) -> bool:
    """Return whether a source has given a whole epoch since ``start``: it is at the same place, an epoch later."""
    return here >= Lap(start.epoch + 1, start.outputs)


def is_over(stop: Stop, starts: Sequence[Lap], here: Sequence[Lap], last_weights: Sequence[float]) -> bool:
    """Return whether an epoch of a mixture that began at ``starts`` ends ``here``; see ``MixturePlan.steps_left``."""
    if stop == "never":
        return False
    round_ = [has_come_round(start, lap) for start, lap in zip(starts, here, strict=True)]
    if stop == "first_exhausted":
        return any(round_)
    return all(done for done, weight in zip(round_, last_weights, strict=True) if weight)
