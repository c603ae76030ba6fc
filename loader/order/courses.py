"""Courses: which positions of which epochs of sources a run takes, step by step, from where it stands on.

An epoch of one data set is cut by its own batches, and the next one begins behind its last. Epochs of a mixture follow
each other without a gap in any source, whose own epochs are laid end to end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from .spans import EpochSpans, Part, Taken

if TYPE_CHECKING:
    from .mixtures.mixture import Cursor, MixturePlan
    from .permutation import IntArray

_MOST_PARTS = 64  # epochs of sources in a span of several steps


class EpochCourse:
    """The course of one data set, from ``position`` of ``epoch`` on. Both are its mutable state."""

    def __init__(self, epoch: int, position: int) -> None:
        self._epoch = epoch
        self._position = position

    def take(self, spans_of: Callable[[int, int], EpochSpans], most: int) -> Taken:
        epoch, first, spans = self._epoch, self._position, spans_of(0, self._epoch)
        size = spans.plan.num_samples
        if steps := spans.steps.ahead(first, most):
            bounds = spans.steps.bounds(first, steps)
            self._position = int(bounds[-1])
        else:
            bounds = np.array([size], np.int64)
            self._epoch, self._position = epoch + 1, 0
        of_sources = epoch * size + bounds[[0, -1], None]
        return Taken(epoch, bounds, (Part(0, epoch, bounds),), of_sources)


class MixtureCourse:
    """The course of a mixture, from ``here`` on, in an epoch that began at ``start``. Both, and the epoch, change."""

    def __init__(self, plan: MixturePlan, epoch: int, start: Cursor, here: Cursor) -> None:
        self._plan = plan
        self._epoch = epoch
        self._start = start
        self._here = here
        self._left = plan.steps_left(start, here)

    def take(self, spans_of: Callable[[int, int], EpochSpans], most: int) -> Taken:
        plan, epoch, here = self._plan, self._epoch, self._here
        steps = most if self._left is None else min(most, self._left)
        if not steps:
            self._epoch, self._start, self._left = epoch + 1, here, plan.steps_left(here, here)
            taken = np.array([here.taken, here.taken], np.int64)
            return Taken(epoch, np.zeros(1, np.int64), (), taken)
        taken = plan.bounds(here, steps)
        while steps > 1 and self._count_parts(taken) > _MOST_PARTS:
            steps //= 2
            taken = taken[: steps + 1]
        first = here.position - self._start.position
        bounds = first + np.arange(steps + 1, dtype=np.int64) * plan.global_batch_size
        parts = tuple(part for source in range(plan.num_sources) for part in self._cut_epochs(source, taken[:, source]))
        self._here = plan.advance(here, steps)
        self._left = None if self._left is None else self._left - steps
        return Taken(epoch, bounds, parts, taken[[0, -1]])

    def _count_parts(self, taken: IntArray) -> int:
        sizes = np.array(self._plan.sizes, np.int64)
        used = taken[-1] > taken[0]
        return int(((taken[-1] - 1) // sizes - taken[0] // sizes + 1)[used].sum())

    def _cut_epochs(self, source: int, taken: IntArray) -> Iterator[Part]:
        """The epochs of a source that steps lie in."""
        size = self._plan.sizes[source]
        if taken[-1] > taken[0]:
            for epoch in range(int(taken[0]) // size, (int(taken[-1]) - 1) // size + 1):
                yield Part(source, epoch, np.clip(taken - epoch * size, 0, size))
