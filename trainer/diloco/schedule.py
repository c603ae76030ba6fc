"""Turns of the model's parts in exchanges between learners, as arithmetic on steps.

Fragments take turns (Streaming DiLoCo, arXiv 2501.18512): each is exchanged every H steps, and their turns are spread
evenly over these.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ExchangeSchedule:
    """Turns of ``fragments``, each of which comes every ``every`` steps; at most one comes after each step."""

    every: int
    fragments: int
    overlap: int

    def starting_after(self, step: int) -> int | None:
        """Return the fragment whose exchange starts after ``step`` steps of training, if there is one.

        Fragment p of P comes at H (p + 1) / P, rounded down, and every H steps from there: the last at H itself.
        """
        place = step % self.every or self.every
        return next((p for p in range(self.fragments) if (p + 1) * self.every // self.fragments == place), None)

    def used_after(self, step: int) -> int:
        """Return after how many steps the result of an exchange is used that started after ``step``."""
        return step + self.overlap


def cut_fragments(sizes: Sequence[int], fragments: int) -> list[list[int]]:
    """Cut consecutive tensors of these sizes into fragments of about equal size; returns their indices.

    Each has at least one tensor; there are at least as many tensors as fragments. The largest is as small as can be.
    """
    low, high = max(max(sizes, default=0), -(-sum(sizes) // fragments)), sum(sizes)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if _fill(sizes, fragments, middle) is not None else (middle + 1, high)
    found = _fill(sizes, fragments, low)
    assert found is not None, "a limit of all sizes together is never met"
    return found


def _fill(sizes: Sequence[int], fragments: int, limit: int) -> list[list[int]] | None:
    """Fill fragments of at most ``limit`` one after another, leaving at least one tensor for each; None if it fails."""
    found: list[list[int]] = [[]]
    room = limit
    for index, size in enumerate(sizes):
        is_needed = len(sizes) - index <= fragments - len(found)  # each later fragment takes one
        if found[-1] and (size > room or is_needed):
            found.append([])
            room = limit
        found[-1].append(index)
        room -= size
    return found if len(found) == fragments else None
