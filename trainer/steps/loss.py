"""Check a loss function and its results."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import TrainerConfigError

LossFunction = Callable[[nn.Module, Any], tuple[torch.Tensor, torch.Tensor | float]]
"""(model, batch) -> the sum of the losses, () with a gradient, and the count of samples or tokens in it."""


def check_loss(given: Any) -> tuple[torch.Tensor, torch.Tensor | float]:
    """The loss function's result, if it is a sum and a count.

    Raises:
        TrainerConfigError: it is something else.
    """
    if not (isinstance(given, tuple) and len(given) == 2):
        raise TrainerConfigError(
            f"the loss function returned a {type(given).__name__}; it must return two values: the sum of the losses, "
            "and the count of samples or tokens in it"
        )
    total, count = given
    if isinstance(total, DTensor):
        raise TrainerConfigError(
            "the sum that the loss function returned is a DTensor, because it uses parameters that lie in shards, as a "
            "sum over model.parameters() does; compute that in the model's forward, use the optimizer's weight_decay "
            "for it, or parallel.zero=0"
        )
    if not (isinstance(total, torch.Tensor) and total.ndim == 0 and total.requires_grad):
        got = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            got = f"a tensor of shape {tuple(total.shape)}{'' if total.requires_grad else ' without a gradient'}"
        raise TrainerConfigError(
            f"the loss function returned {got} as the sum; it must be a tensor of shape () with a gradient, such as "
            "losses.sum()"
        )
    if total.is_complex():
        raise TrainerConfigError(
            f"the loss function returned a sum of {total.dtype}; it must be a real number, such as losses.abs().sum()"
        )
    if isinstance(count, torch.Tensor) and count.numel() == 1 and not count.is_complex():
        if count.device.type != "cpu":  # the ranks' sum is checked, which nobody waits for
            return total, count
        count = float(count.detach())
    elif not isinstance(count, numbers.Real):
        got = (
            f"a tensor of shape {tuple(count.shape)}"
            if isinstance(count, torch.Tensor)
            else f"a {type(count).__name__}"
        )
        raise TrainerConfigError(
            f"the loss function returned {got} as the count; it must be the number of samples or tokens in the sum, "
            "such as len(losses)"
        )
    check_count(float(count), "the loss function returned")
    return total, float(count)


def check_count(count: float, whose: str) -> None:
    """Refuse a count by which no mean can be taken: with one below zero, training would climb."""
    if not 0 <= count < math.inf:
        raise TrainerConfigError(
            f"{whose} {count:g} as the count; it must be the number of samples or tokens in the sum, 0 or more, such "
            "as len(losses)"
        )
