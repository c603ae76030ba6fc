"""Epochs of a mixture, as far as arithmetic tells: where one began, and how many batches are left of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..order.mixtures.mixture import Cursor, MixturePlan
from ..order.permutation import IntArray
from ..order.spans import SourceOrder


@dataclass(frozen=True, kw_only=True)
class Place:
    """From where on a run is read: at ``here``, ``consumed`` samples into an epoch that began at ``start``."""

    plan: MixturePlan
    orders: Sequence[SourceOrder]
    epoch: int
    start: Cursor
    consumed: int
    here: Cursor


@dataclass(frozen=True, slots=True)
class EpochPlace:
    """An epoch's start, and a place inside it that is known: ``left`` batches before its end (None: it has none)."""

    start: Cursor
    base: Cursor
    left: int | None

    @property
    def base_consumed(self) -> int:
        return self.base.position - self.start.position


@dataclass(frozen=True, slots=True)
class EpochSteps:
    """The batches of an epoch, each of ``size`` samples; ``left_at`` tells how many are left at a position."""

    size: int
    left_at: Callable[[int], int | None]

    def ahead(self, first: int, most: int) -> int:
        left = self.left_at(first)
        return most if left is None else min(most, left)

    def bounds(self, first: int, steps: int) -> IntArray:
        found: IntArray = first + np.arange(steps + 1, dtype=np.int64) * self.size
        return found

    def count(self, first: int) -> int:
        left = self.left_at(first)
        if left is None:
            raise TypeError("a mixture with stop='never' has no length; count the steps, or give another stop")
        return left
