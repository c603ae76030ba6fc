"""A model, a loss and batches for tests of microbatches: what notices how often and with how many rows it is run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config

ROWS = 50


class Net(nn.Module):
    """Dropout, a batch norm whose statistics forward changes, a buffer that is replaced, blocks to recompute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Dropout(0.3)) for _ in range(2)])
        self.norm = nn.BatchNorm1d(4)
        self.out = nn.Linear(4, 1)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class LimitedLoss:
    """A loss for which a device has memory for so many rows; counts what it was asked for."""

    def __init__(self, limit: int = 10**9, error: Exception | None = None) -> None:
        self.limit, self.refused, self.rows = limit, 0, [0]
        self.error = error or torch.OutOfMemoryError("CUDA out of memory.")

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        found = model(batch["x"]).squeeze(1)
        if len(batch["x"]) > self.limit:
            self.refused += 1
            raise self.error
        self.rows.append(len(batch["x"]))
        random.random(), np.random.rand()
        return (found - batch["y"]).square().sum(), len(batch["x"])


def loader(size: int = 16) -> ArrayLoader:
    draw = torch.Generator().manual_seed(3)
    x, y = torch.randn(ROWS, 4, generator=draw), torch.randn(ROWS, generator=draw)
    return ArrayLoader({"x": x, "y": y}, global_batch_size=size, last_batch="partial")


def make(world: World, folder: Path, loss: LimitedLoss, batches: Any = None, **options: Any) -> DistributedTrainer:
    values = {"steps": 6, "precision": {"dtype": "fp32"}, "report": {"quiet": True, "every": 1}, **options}
    return DistributedTrainer(
        Net(),
        lambda parameters: torch.optim.Adam(parameters, lr=0.05),
        loader() if batches is None else batches,
        build_config(TrainerConfig, {"output_dir": str(folder), **values}),
        loss=loss,
        world=world,
    )


def train(world: World, folder: Path, loss: LimitedLoss, **options: Any) -> tuple[dict[str, Any], DistributedTrainer]:
    with make(world, folder, loss, **options) as trainer:
        trainer.train()
        inner = trainer.parallel.inner
        values = {**inner.state_dict(), "calls": inner.calls}
        return {name: value.detach().clone() for name, value in values.items()}, trainer
