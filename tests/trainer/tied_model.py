"""A model with what is easily forgotten: tied weights, blocks, a batch norm, and a module without reset_parameters."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn


class Scaled(nn.Module):
    """Without reset_parameters, with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((2,), 1.5))
        self.register_buffer("shift", torch.full((2,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift


class Tied(nn.Module):
    """Blocks, a batch norm, and a weight that two modules share."""

    def __init__(self, middle: Callable[[], nn.Module] = nn.Identity) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList([nn.Linear(2, 2) for _ in range(3)])
        self.norm = nn.BatchNorm1d(2)
        self.middle = middle()
        self.last = nn.Linear(2, 2)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.middle(self.norm(x)))


def initialise_scaled(name: str, module: nn.Module) -> None:
    if isinstance(module, Scaled):
        module.scale.fill_(1.5)
        module.shift.fill_(0.25)


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    return {name: getattr(one, "full_tensor", lambda one=one: one)().detach().clone() for name, one in tensors.items()}
