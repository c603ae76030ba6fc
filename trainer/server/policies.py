"""Policies: when a worker may read on, and when what workers pushed is applied.

A worker's clock counts the steps that it has finished. Policies are asked, and never wait: time comes from outside.
``slow_workers`` names the workers that one with ``clock`` has to wait for before it reads; none: it may read.
``merges`` says whether pushes are applied one by one as they come, or merged: those of one step, or of a quorum.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from ..errors import TrainerConfigError

Verdict = Literal["open", "close", "failed"]


@dataclass(frozen=True)
class Asp:
    """Asynchronous: nobody waits."""

    merges: ClassVar[Literal["no"]] = "no"

    def slow_workers(self, clocks: Mapping[str, int], clock: int) -> list[str]:
        return []


@dataclass(frozen=True)
class Ssp:
    """Stale synchronous: a worker reads while nobody is more than ``staleness`` steps behind (Ho et al. 2013).

    With a staleness of 0 it is ``Bsp``.
    """

    staleness: int

    def __post_init__(self) -> None:
        if self.staleness < 0:
            raise TrainerConfigError(f"staleness={self.staleness} must be 0 or more; for no bound use asp")

    @property
    def merges(self) -> Literal["no", "by clock"]:
        """At a staleness of 0 the pushes of a step are merged, so that their order does not count."""
        return "no" if self.staleness else "by clock"

    def slow_workers(self, clocks: Mapping[str, int], clock: int) -> list[str]:
        return sorted(worker for worker, other in clocks.items() if clock - other > self.staleness)


@dataclass(frozen=True)
class Bsp:
    """Bulk synchronous: pushes of a step are merged in the order of workers' names once all have finished it."""

    merges: ClassVar[Literal["by clock"]] = "by clock"

    def slow_workers(self, clocks: Mapping[str, int], clock: int) -> list[str]:
        return sorted(worker for worker, other in clocks.items() if other < clock)


@dataclass(frozen=True, kw_only=True)
class Quorum:
    """Nobody waits; a round closes when ``least`` workers pushed and a grace time is over, or all pushed.

    A push that comes later is of the next round (Decoupled DiLoCo, 2026). Times are in seconds.
    """

    least: int
    grace: float
    patience: float = math.inf
    """From a round's first push to the failure for want of a quorum."""

    merges: ClassVar[Literal["by quorum"]] = "by quorum"

    def __post_init__(self) -> None:
        if self.least < 1:
            raise TrainerConfigError(f"a quorum of {self.least} must be 1 or more")
        if not (self.grace >= 0 and self.patience > 0):
            raise TrainerConfigError(f"grace={self.grace} must be 0 or more, and patience={self.patience} above 0")

    def slow_workers(self, clocks: Mapping[str, int], clock: int) -> list[str]:
        return []

    def verdict(self, arrivals: Mapping[str, float], members: Collection[str], now: float) -> Verdict:
        """Judge a round by the time of each worker's first push in it; once all have left, nobody else will come."""
        if not arrivals:
            return "open"
        if not members:
            return "close"
        times = sorted(arrivals.values())
        if len(times) >= self.least:
            is_over = now >= times[self.least - 1] + self.grace
            return "close" if is_over or set(members) <= set(arrivals) else "open"
        return "failed" if now >= times[0] + self.patience else "open"


AnyPolicy = Asp | Ssp | Bsp | Quorum


def parse_policy(text: str) -> AnyPolicy:
    """Make a policy of its text: ``bsp``, ``asp``, ``ssp(4)`` or ``quorum(3, 0.5)``, the grace in seconds.

    Raises:
        TrainerConfigError: it is none of these, or a number of it is out of range.
    """
    name, _, rest = text.replace(" ", "").partition("(")
    numbers = rest.removesuffix(")").split(",") if rest.endswith(")") else []
    try:
        if text == "bsp":
            return Bsp()
        if text == "asp":
            return Asp()
        if name == "ssp" and len(numbers) == 1:
            return Ssp(int(numbers[0]))
        if name == "quorum" and len(numbers) == 2:
            return Quorum(least=int(numbers[0]), grace=float(numbers[1]))
    except ValueError as exc:
        if isinstance(exc, TrainerConfigError):
            raise
    raise TrainerConfigError(f"policy={text!r} must be 'bsp', 'asp', 'ssp(4)' or 'quorum(3, 0.5)'")
