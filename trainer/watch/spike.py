"""Loss spikes: a loss far above the last ones. Arithmetic on numbers that all ranks have, and so alike on all."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

from ..errors import TrainerConfigError
from ..options import check_choice, check_range

_SIGMAS_PER_MAD = 1.4826  # of a normal distribution
_LEAST_SPREAD = 1e-3  # of the median: losses that do not scatter at all are no reason to take each rise for a spike


@dataclass(frozen=True, kw_only=True)
class SpikeConfig:
    """What counts as a loss spike, and what is done about one."""

    on_spike: Literal["ignore", "note", "rewind"] = "ignore"
    """note: tell the observers; rewind: go back to the last good checkpoint and skip the batches since."""

    window: int = 100
    """Steps whose losses a loss is compared with; before there are as many, nothing is a spike."""

    threshold: float = 6.0
    """Robust standard deviations above the window's median from which a loss is suspicious."""

    patience: int = 1
    """Suspicious steps in a row that make a spike."""

    skip_batches: int = 0
    """rewind: also skip the global batches of so many steps after the spike."""

    margin: int = 1
    """rewind: the checkpoint must be from at least so many steps before the spike's first."""

    max_rewinds: int = 3
    """rewind: stop with an error at the next spike after as many, counted over restarts."""

    without_checkpoint: Literal["continue", "stop"] = "continue"
    """rewind: what to do where there is no checkpoint to go back to."""

    schedule: Literal["rewind", "continue"] = "rewind"
    """rewind: whether the learning rate goes back with the weights."""

    def __post_init__(self) -> None:
        check_choice("spike.on_spike", self.on_spike, ("ignore", "note", "rewind"))
        check_range("spike.window", self.window, low=4)
        check_range("spike.threshold", self.threshold, low=0.0, above=True)
        check_range("spike.patience", self.patience, low=1)
        check_range("spike.skip_batches", self.skip_batches, low=0)
        check_range("spike.margin", self.margin, low=0)
        check_range("spike.max_rewinds", self.max_rewinds, low=1)
        check_choice("spike.without_checkpoint", self.without_checkpoint, ("continue", "stop"))
        check_choice("spike.schedule", self.schedule, ("rewind", "continue"))
        if 4 * self.patience > self.window:
            raise TrainerConfigError(
                f"spike.patience={self.patience} is more than a quarter of spike.window={self.window}, so that a spike "
                f"would move the median that it is compared with; give spike.window={4 * self.patience} or more"
            )


@dataclass(frozen=True, kw_only=True)
class Spike:
    """Steps ``first`` to ``last`` (0-based, inclusive), and in words what is wrong with the last."""

    first: int
    last: int
    problem: str


class SpikeWatch:
    """Compares each loss with the window of those before it: with their median and median absolute deviation.

    A loss is suspicious if it is above median + threshold * 1.4826 * MAD (the robust z-score of Leys et al. 2013, one
    side of it), the deviation being at least a thousandth of the median. Suspicious losses join the window: a level
    that stays becomes the new normal. All mutable state: the window, and the suspicious steps in a row.
    """

    def __init__(self, config: SpikeConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self._first: int | None = None
        self._count = 0

    @property
    def is_undecided(self) -> bool:
        """Return whether the last steps are suspicious, but too few to be a spike."""
        return 0 < self._count < self._config.patience

    def add(self, step: int, loss: float) -> Spike | None:
        """Take a finite loss; returns the spike that it completes, once for each."""
        limit = self._limit()
        self._losses.append(loss)
        if limit is None or loss <= limit:
            self.calm()
            return None
        self._first = step if self._first is None else self._first
        self._count += 1
        if self._count != self._config.patience:
            return None
        steps = "" if self._count == 1 else f", for {self._count} steps in a row"
        problem = (
            f"step {step}: the loss {loss:.6g} is above {limit:.6g}, {self._config.threshold:g} deviations over the "
            f"median of {self._config.window} steps{steps}"
        )
        return Spike(first=self._first, last=step, problem=problem)

    def add_not_finite(self, step: int, problem: str) -> Spike:
        """Take a step whose loss or gradient is not finite: a spike at once."""
        first = step if self._first is None else self._first
        self.calm()
        return Spike(first=first, last=step, problem=problem)

    def calm(self) -> None:
        """Forget the suspicious steps, but not their losses."""
        self._first, self._count = None, 0

    def state_dict(self) -> dict[str, Any]:
        """JSON, and the same for any number of ranks."""
        return {"losses": list(self._losses), "first": self._first, "count": self._count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._losses = deque(state["losses"], maxlen=self._config.window)
        self._first, self._count = state["first"], state["count"]

    def _limit(self) -> float | None:
        if len(self._losses) < self._config.window:
            return None
        middle = median(self._losses)
        deviation = _SIGMAS_PER_MAD * median(abs(loss - middle) for loss in self._losses)
        spread = max(deviation, _LEAST_SPREAD * abs(middle))
        return middle + self._config.threshold * spread if spread else None
