"""Account of what was delivered against what was planned: arithmetic on the ranks' logs, without I/O."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .data import is_batch_of

Line = dict[str, Any]
Position = tuple[int, int]  # epoch, consumed samples


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """Start of a job: where it began, and each rank's log."""

    start: Position
    ranks: Sequence[Sequence[Line]]

    @property
    def reached(self) -> Position:
        """Position up to which every rank has its batches: the next attempt resumes there."""
        return min(max([self.start, *_positions(lines)]) for lines in self.ranks)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Samples that count: ``delivered`` rows; ``missing`` and ``repeated`` of those reached; ``wrong`` in content.

    ``misplaced``: global batches that are not those of the plan. ``replayed``: rows delivered before a kill and again
    after it, because the next attempt went on from a position before them.
    """

    delivered: int
    missing: int
    repeated: int
    wrong: int
    misplaced: int
    replayed: int

    @property
    def is_exact(self) -> bool:
        return not (self.missing or self.repeated or self.wrong or self.misplaced)


def account(attempts: Sequence[Attempt], plan_epoch: Callable[[int], Sequence[Sequence[int]]]) -> Account:
    """Account for all batches up to where the last attempt came.

    ``plan_epoch(epoch)`` gives the sample ids of each global batch; batches begin at multiples of the first's length.
    """
    batches: defaultdict[Position, list[int]] = defaultdict(list)
    wrong = replayed = 0
    for attempt, following in zip(attempts, [*attempts[1:], None], strict=True):
        until = attempt.reached if following is None else following.start
        for lines in attempt.ranks:
            for line in _batches(lines):
                position = (line["epoch"], line["stop"])
                wrong += len(line["wrong"])
                if position <= until:
                    batches[position] += line["ids"]
                else:
                    replayed += len(line["ids"])
    missing = repeated = misplaced = delivered = 0
    ends: set[Position] = set()
    for epoch, planned in _reached_batches(attempts, plan_epoch):
        got: Counter[int] = Counter()
        expected: Counter[int] = Counter()
        for stop, ids in planned:
            ends.add((epoch, stop))
            delivered_here = batches.get((epoch, stop), [])
            got.update(delivered_here)
            expected.update(ids)
            misplaced += not is_batch_of(ids, delivered_here)
        delivered += got.total()
        missing += (expected - got).total()
        repeated += (got - expected).total()
    misplaced += len(batches.keys() - ends)
    return Account(
        delivered=delivered,
        missing=missing,
        repeated=repeated,
        wrong=wrong,
        misplaced=misplaced,
        replayed=replayed,
    )


def _reached_batches(
    attempts: Sequence[Attempt], plan_epoch: Callable[[int], Sequence[Sequence[int]]]
) -> list[tuple[int, list[tuple[int, Sequence[int]]]]]:
    """The global batches between the first start and where the last attempt came: (position after it, ids)."""
    if not attempts:
        return []
    (first, begun), (last, consumed) = attempts[0].start, attempts[-1].reached
    reached = []
    for epoch in range(first, last + 1):
        stop, batches = 0, []
        for ids in plan_epoch(epoch):
            stop += len(ids)
            if (epoch > first or stop > begun) and (epoch < last or stop <= consumed):
                batches.append((stop, ids))
        reached.append((epoch, batches))
    return reached


def longest_gap_s(attempts: Sequence[Attempt]) -> float:
    """The longest time that any rank of one attempt waited for a batch, the first included."""
    longest = 0.0
    for attempt in attempts:
        for lines in attempt.ranks:
            times = [line["t"] for line in lines if line["kind"] in {"open", "batch"}]
            longest = max([longest, *(later - earlier for earlier, later in pairwise(times))])
    return longest


def _batches(lines: Sequence[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] == "batch"]


def _positions(lines: Sequence[Line]) -> list[Position]:
    return [(line["epoch"], line["stop"]) for line in _batches(lines)]
