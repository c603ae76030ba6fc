"""What a loss function is, and whether it returned what it must."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .errors import TrainerConfigError

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
    total = given[0]
    if not (isinstance(total, torch.Tensor) and total.ndim == 0 and total.requires_grad):
        got = f"a {type(total).__name__}"
        if isinstance(total, torch.Tensor):
            got = f"a tensor of shape {tuple(total.shape)}{'' if total.requires_grad else ' without a gradient'}"
        raise TrainerConfigError(
            f"the loss function returned {got} as the sum; it must be a tensor of shape () with a gradient, such as "
            "losses.sum()"
        )
    return given
