"""Optimizers on shards: the arithmetic of torch's, operation for operation, on pieces and on rows.

A piece or a row owns its state, so that it can move to another shard. Each operation works on one element or one row,
so that cutting a tensor changes no bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import TrainerConfigError

State = dict[str, Tensor]
"""Tensors of (n, ...) for n pieces or rows."""


class Optimizer(Protocol):
    """One step on values (n, width), of which each row is a piece, or a row of a table, of its own."""

    @property
    def rate(self) -> float:
        """The learning rate where a push names none."""

    def new_state(self, like: Tensor) -> State:
        """Make the state of values (n, width) that have had no step."""

    def step(self, values: Tensor, gradients: Tensor, state: State, rate: float) -> None:
        """Step values in place along gradients, both (n, width), and change the state in place."""


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Steps as ``torch.optim.SGD``; with rate -1 it adds what is pushed."""

    rate: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check_numbers(rate=self.rate, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.nesterov and self.momentum <= 0:
            raise TrainerConfigError("nesterov=True needs a momentum above 0")

    def new_state(self, like: Tensor) -> State:
        return {"momentum": torch.zeros_like(like)} if self.momentum else {}

    def step(self, values: Tensor, gradients: Tensor, state: State, rate: float) -> None:
        if self.weight_decay:
            gradients = gradients.add(values, alpha=self.weight_decay)
        if self.momentum:
            velocity = state["momentum"].mul_(self.momentum).add_(gradients)
            gradients = gradients.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        values.add_(gradients, alpha=-rate)


def outer_nesterov(*, rate: float = 0.7, momentum: float = 0.9) -> Sgd:
    """DiLoCo's outer optimizer; what is pushed is the parameters before the inner steps minus those after them."""
    return Sgd(rate=rate, momentum=momentum, nesterov=momentum > 0)


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Steps as ``torch.optim.AdamW``; each piece or row counts its own steps."""

    rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check_numbers(rate=self.rate, eps=self.eps, weight_decay=self.weight_decay)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise TrainerConfigError(f"betas={self.betas} must be at least 0 and less than 1")

    def new_state(self, like: Tensor) -> State:
        counts = torch.zeros(len(like), dtype=torch.int64)
        return {"first": torch.zeros_like(like), "second": torch.zeros_like(like), "steps": counts}

    def step(self, values: Tensor, gradients: Tensor, state: State, rate: float) -> None:
        beta1, beta2 = self.betas
        steps = state["steps"].add_(1)
        if self.weight_decay:
            values.mul_(1 - rate * self.weight_decay)
        state["first"].lerp_(gradients, 1 - beta1)
        state["second"].mul_(beta2).addcmul_(gradients, gradients, value=1 - beta2)
        if len(values) == 1:
            count = int(steps)
            divisor = (state["second"].sqrt() / (1 - beta2**count) ** 0.5).add_(self.eps)
            values.addcdiv_(state["first"], divisor, value=-(rate / (1 - beta1**count)))
            return
        counts, places = torch.unique(steps, return_inverse=True)
        roots = torch.tensor([(1 - beta2**count) ** 0.5 for count in counts.tolist()])[places]
        sizes = torch.tensor([-(rate / (1 - beta1**count)) for count in counts.tolist()])[places]
        divisor = (state["second"].sqrt() / roots[:, None]).add_(self.eps)
        values.add_((state["first"] * sizes[:, None]).div_(divisor))  # in the order of addcdiv, which knows one size


@dataclass(frozen=True, kw_only=True)
class Adagrad:
    """Steps as ``torch.optim.Adagrad`` without a decay of the rate."""

    rate: float = 1e-2
    eps: float = 1e-10
    weight_decay: float = 0.0
    initial: float = 0.0
    """The sums at the beginning."""

    def __post_init__(self) -> None:
        _check_numbers(rate=self.rate, eps=self.eps, weight_decay=self.weight_decay, initial=self.initial)

    def new_state(self, like: Tensor) -> State:
        return {"sum": torch.full_like(like, self.initial)}

    def step(self, values: Tensor, gradients: Tensor, state: State, rate: float) -> None:
        if self.weight_decay:
            gradients = gradients.add(values, alpha=self.weight_decay)
        total = state["sum"].addcmul_(gradients, gradients, value=1)
        values.addcdiv_(gradients, total.sqrt().add_(self.eps), value=-rate)


@dataclass(frozen=True, kw_only=True)
class RowWiseAdagrad:
    """Divides by the root of one sum a row, of the mean squares of its gradients: 4 bytes a row of state."""

    rate: float = 1e-2
    eps: float = 1e-10

    def __post_init__(self) -> None:
        _check_numbers(rate=self.rate, eps=self.eps)

    def new_state(self, like: Tensor) -> State:
        return {"sum": torch.zeros(len(like), 1)}

    def step(self, values: Tensor, gradients: Tensor, state: State, rate: float) -> None:
        total = state["sum"].add_((gradients * gradients).mean(1, keepdim=True))
        values.addcdiv_(gradients, total.sqrt().add_(self.eps).expand_as(values), value=-rate)


def _check_numbers(**numbers: float) -> None:
    for name, value in numbers.items():
        if not math.isfinite(value) or (value < 0 and name != "rate"):
            raise TrainerConfigError(f"{name}={value} must be a finite number" + (", 0 or more" * (name != "rate")))
