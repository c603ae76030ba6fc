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
    wanted = batch["x"].sum(1)  # so all weights become 1
    return (model(batch["x"]).squeeze(1) - wanted).square().sum(), len(wanted)


def measure(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    return {"loss": squares(model, batch)}


def make_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False))
