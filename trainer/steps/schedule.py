"""The learning rate: a pure function of the updates made so far and of the effective batch size."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ..errors import TrainerConfigError
from ..imports import import_name
from ..options import check_choice, check_range

Shape = Callable[[int, int], float]
_FALLING = ("linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """How the rate changes from warm-up to the end, and with the batch size."""

    shape: str = "constant"
    """constant, linear, cosine, or package.module:name of a function f(update, total) that returns a factor."""

    warmup_steps: int = 0
    """Updates in which the factor climbs linearly from 1/warmup to 1."""

    end_factor: float = 0.0
    """Factor that linear and cosine come to when the last update is done."""

    scaling: Literal["none", "linear", "sqrt"] = "none"
    """How the rate follows the effective batch size over the base batch size."""

    base_batch_size: int | None = None
    """Samples per update for which the optimizer's rate was chosen; with parallel.mode=diloco, of one learner."""

    def __post_init__(self) -> None:
        if ":" not in self.shape:
            check_choice("schedule.shape", self.shape, ("constant", "linear", "cosine"))
        check_range("schedule.warmup_steps", self.warmup_steps, low=0)
        check_range("schedule.end_factor", self.end_factor, low=0.0)
        if self.end_factor and self.shape not in _FALLING:
            raise TrainerConfigError(
                f"schedule.end_factor={self.end_factor} is where linear and cosine end, and "
                f"schedule.shape={self.shape!r} does not come there; give schedule.shape='cosine' or 'linear', or "
                "schedule.end_factor=0"
            )
        check_choice("schedule.scaling", self.scaling, ("none", "linear", "sqrt"))
        check_range("schedule.base_batch_size", self.base_batch_size, low=1)
        if self.scaling != "none" and self.base_batch_size is None:
            raise TrainerConfigError(
                f"schedule.scaling={self.scaling!r} needs a base; give schedule.base_batch_size, the samples per "
                "update for which the rate was chosen, or schedule.scaling='none'"
            )


def rate_factor(config: ScheduleConfig, update: int, total: int) -> float:
    """The factor on the base rate at update ``update`` (0-based) of ``total``, without that of the batch size.

    The cosine is that of SGDR (Loshchilov and Hutter 2017, equation 5), without restarts.
    """
    if update < config.warmup_steps:
        return (update + 1) / config.warmup_steps
    if config.shape == "constant":
        return 1.0
    span = max(1, total - config.warmup_steps)
    progress = min(1.0, (update - config.warmup_steps) / span)
    if config.shape == "linear":
        return 1.0 + (config.end_factor - 1.0) * progress
    if config.shape == "cosine":
        return config.end_factor + (1.0 - config.end_factor) * 0.5 * (1.0 + math.cos(math.pi * progress))
    raise AssertionError(f"{config.shape!r} is resolved by Schedule")


def batch_factor(config: ScheduleConfig, effective_batch_size: int | None) -> float:
    """The factor on the base rate for an effective batch size, in samples per update.

    Linear: Goyal et al. 2017, section 2.1. Square root: Krizhevsky 2014, section 5; for Adam, Malladi et al. 2022.
    """
    if config.scaling == "none":
        return 1.0
    assert effective_batch_size is not None, "the run's length is refused without it"
    assert config.base_batch_size is not None, "the config is refused without it"
    ratio = effective_batch_size / config.base_batch_size
    return ratio if config.scaling == "linear" else math.sqrt(ratio)


class Schedule:
    """Sets the rates of an optimizer's groups; its state is each group's base rate, and the rate set last.

    Raises:
        TrainerConfigError: a group has no rate, or a scheduler of torch's sets it.
    """

    def __init__(
        self,
        config: ScheduleConfig,
        optimizer: torch.optim.Optimizer,
        *,
        total_updates: int,
        effective_batch_size: int | None,
    ) -> None:
        self._config = config
        self._optimizer = optimizer
        self._total = total_updates
        self._base_rates = [_base_rate(optimizer, number) for number in range(len(optimizer.param_groups))]
        self._rates = list(self._base_rates)
        self._batch_factor = batch_factor(config, effective_batch_size)
        self._shape = self._import_shape(config.shape) if ":" in config.shape else None

    @property
    def rate(self) -> float:
        """The rate of the first group, as last set."""
        return float(self._optimizer.param_groups[0]["lr"])

    def set_rates(self, update: int) -> None:
        """Set every group's rate for 0-based update ``update``.

        Raises:
            TrainerConfigError: something else has set a rate, which this would write over, or has added a group; or the
                schedule's own function returned what is no factor.
        """
        self._check_groups()
        factor = self._factor(update) * self._batch_factor
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=True):
            _set_rate(group, base * factor)
        self._rates = [base * factor for base in self._base_rates]

    def describe(self) -> dict[str, Any]:
        """Describe all that decides the rates, as JSON: the same on every rank."""
        config = self._config
        ends = {"end_factor": config.end_factor} if config.shape in _FALLING else {}
        length = {} if config.shape == "constant" else {"updates": self._total}
        shape = {"shape": config.shape, "warmup_steps": config.warmup_steps, **ends, **length}
        return {"lr": list(self._base_rates), **shape, "batch_factor": self._batch_factor}

    def tell_changes(
        self,
        saved: Mapping[str, Any] | None,
        tell: Callable[[str], None],
        groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """Tell of each value that ``describe`` had otherwise in a checkpoint; those of before have none.

        ``groups`` are, for each group, those of the checkpoint with its parameters; without them the same ones.
        """
        for name, value in self.describe().items():
            if saved and name in saved:
                then = saved[name] if name != "lr" or groups is None else self._rates_of(groups, saved[name])
                if then != value:
                    tell(f"schedule: {name}={value!r}; the checkpoint had {then!r}")

    def _rates_of(self, groups: Sequence[Sequence[int]], saved: Sequence[float]) -> list[Any]:
        """The rates that a checkpoint has of each group: several where it had several groups; of none, that of now."""
        rates: list[Any] = []
        for base, numbers in zip(self._base_rates, groups, strict=True):
            there = list(dict.fromkeys(saved[number] for number in numbers)) or [base]
            rates.append(there[0] if len(there) == 1 else there)
        return rates

    def end(self) -> None:
        """Reset the rates to the base rates: another trainer may continue with the optimizer."""
        for group, base in zip(self._optimizer.param_groups, self._base_rates, strict=False):
            if "lr" in group:  # a state that could not be loaded may have broken the groups
                _set_rate(group, base)

    def _check_groups(self) -> None:
        groups = self._optimizer.param_groups
        if len(groups) != len(self._base_rates):
            raise TrainerConfigError(
                f"optimizer={type(self._optimizer).__name__} has {len(groups)} parameter groups, and "
                f"{len(self._base_rates)} when the trainer was made; build all groups before, and freeze those that "
                "are trained later with requires_grad_(False)"
            )
        for number, (group, rate) in enumerate(zip(groups, self._rates, strict=True)):
            found = group["lr"]
            if isinstance(found, torch.Tensor):
                if found.device.type != "cpu":
                    continue  # a look at it would wait for the device
                rate = float(torch.tensor(rate, dtype=found.dtype))
            if float(found) != rate:
                raise TrainerConfigError(
                    f"the rate of the optimizer's group {number} is {float(found):g}, and the schedule had set "
                    f"{rate:g}, as it does before each step: what a callback or another scheduler sets has no effect; "
                    "give schedule.shape='package.module:name' of a function f(update, total) that returns the factor"
                )

    def _factor(self, update: int) -> float:
        if self._shape is None or update < self._config.warmup_steps:
            return rate_factor(self._config, update, self._total)
        found = self._shape(update, self._total)
        try:
            factor = float(found)
        except (TypeError, ValueError):
            factor = math.nan
        if not 0.0 <= factor < math.inf:
            raise TrainerConfigError(
                f"schedule.shape={self._config.shape!r} returned {found!r} for update {update} of {self._total}; it "
                "must return a factor on the rate: a finite number, 0 or more"
            )
        return factor

    @staticmethod
    def _import_shape(path: str) -> Shape:
        shape = import_name("schedule.shape", path)
        if not callable(shape):
            raise TrainerConfigError(f"schedule.shape={path!r} is not callable; name a function f(update, total)")
        return shape


def _set_rate(group: dict[str, Any], rate: float) -> None:
    if isinstance(group["lr"], torch.Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def _base_rate(optimizer: torch.optim.Optimizer, number: int) -> float:
    group, name = optimizer.param_groups[number], type(optimizer).__name__
    if "lr" not in group:
        raise TrainerConfigError(
            f"optimizer={name} has no rate 'lr' in group {number}, which the schedule sets at each step; give it one"
        )
    if "initial_lr" in group:
        raise TrainerConfigError(
            f"optimizer={name} has a scheduler of torch's ('initial_lr' in group {number}), and the trainer sets the "
            "rates before each step; leave it out, and give schedule.shape: linear, cosine, or package.module:name of "
            "a function f(update, total) that returns the factor"
        )
    return float(group["lr"])
