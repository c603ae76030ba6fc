"""Choose the checkpoints to keep: the newest, and those with the best metric, as far as metrics compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from .config import CheckpointConfig

End = Literal["max", "min"]


@dataclass(frozen=True, kw_only=True)
class Measure:
    """Measure of checkpoints: the name of a metric, and which end of it is good; None where not known."""

    name: str | None = None
    best: End | None = None

    def fits(self, other: Measure) -> bool:
        """Return whether metrics of both can be compared, as far as that is known."""
        pairs = ((self.name, other.name), (self.best, other.best))
        return all(one is None or another is None or one == another for one, another in pairs)


UNKNOWN = Measure()


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Number of checkpoints to keep, and the measure by which some are the best."""

    keep_last: int
    keep_best: int
    measure: Measure

    @classmethod
    def of(cls, config: CheckpointConfig, metric: str | None) -> Retention:
        measure = Measure(name=metric, best=config.best)
        return cls(keep_last=config.keep_last, keep_best=config.keep_best, measure=measure)

    def choose(self, metrics: Mapping[int, float | None], *, keep_last: int | None = None) -> set[int]:
        """Return which steps stay, of those with such metrics by this measure."""
        last = self.keep_last if keep_last is None else keep_last
        return choose_kept(metrics, keep_last=last, keep_best=self.keep_best, best=self.measure.best)


def choose_kept(metrics: Mapping[int, float | None], *, keep_last: int, keep_best: int, best: End | None) -> set[int]:
    """Return which steps stay: the ``keep_last`` newest, and the ``keep_best`` of best metric (the later of equals)."""
    newest = sorted(metrics, reverse=True)[:keep_last]
    sign = 1.0 if best == "max" else -1.0
    measured = [(sign * metric, step) for step, metric in metrics.items() if metric is not None and metric == metric]
    return {*newest, *(step for _, step in sorted(measured, reverse=True)[:keep_best])}
