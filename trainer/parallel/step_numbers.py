"""Numbers that modules add to the records of steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from ..errors import TrainerConfigError


class StepNumbers:
    """Gathers what ``describe_step()`` of a model's modules returns after each update: numbers by name.

    A number is a float, or a tensor of one, which may be on a device: it is read by ``take`` alone. Over modules and
    steps, those whose names end with ``_max`` are the largest, with ``_min`` the least, and others the mean. NaN stands
    for none. Mutable state: these, since they were taken.
    """

    def __init__(self, model: nn.Module) -> None:
        self._modules: list[tuple[str, Any]] = [
            (name, one) for name, one in model.named_modules() if hasattr(type(one), "describe_step")
        ]
        self._sums: dict[str, tuple[Tensor, Tensor]] = {}
        self._extremes: dict[str, Tensor] = {}

    @torch.no_grad()
    def gather(self) -> None:
        """Add the numbers of a step.

        Raises:
            TrainerConfigError: a module returned something else.
        """
        for module_name, module in self._modules:
            found = module.describe_step()
            if not isinstance(found, Mapping):
                self._refuse(module_name, module, f"returned a {type(found).__name__}")
            for name, value in found.items():
                if not isinstance(value, float | int | Tensor) or (isinstance(value, Tensor) and value.numel() != 1):
                    self._refuse(module_name, module, f"returned {value!r} for {name!r}")
                self._add(name, torch.as_tensor(value).reshape(()).to(torch.float64, copy=True))

    def take(self) -> dict[str, float]:
        """The numbers since the last call; those of which there were none are left out."""
        means = {name: total / count for name, (total, count) in self._sums.items()}
        found = {name: float(value) for name, value in {**self._extremes, **means}.items()}
        self._sums, self._extremes = {}, {}
        return {name: value for name, value in found.items() if value == value}

    def _add(self, name: str, value: Tensor) -> None:
        if name.endswith(("_max", "_min")):
            worse = torch.fmax if name.endswith("_max") else torch.fmin  # of which NaN is never the result
            before = self._extremes.get(name)
            self._extremes[name] = value if before is None else worse(before, value.to(before.device))
            return
        total, count = self._sums.get(name, (torch.zeros_like(value), torch.zeros_like(value)))
        value = value.to(total.device)
        self._sums[name] = total + value.where(~value.isnan(), 0.0), count + ~value.isnan()

    def _refuse(self, name: str, module: object, what: str) -> NoReturn:
        raise TrainerConfigError(
            f"{name} ({type(module).__name__}): describe_step() {what}; return a mapping of names to numbers"
        )
