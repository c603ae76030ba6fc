"""A linear model that learns slowly enough to be killed; imports nothing of the tests."""

from __future__ import annotations

import time
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def squares_slowly(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    time.sleep(0.03)
    return squares(model, batch)


def squares(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    wanted = batch["x.npy"].sum(1)  # so the weights of all parts add up to 1
    return (model(batch["x.npy"]) - wanted).square().sum(), len(wanted)


def measure(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"loss": squares(model, batch)}


class Parts(nn.Module):
    """Several linear layers whose outputs are added up, so that their weights lie in several buckets."""

    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(width, 1, bias=False) for _ in range(12))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([part(x).squeeze(1) for part in self.parts]).sum(0)
