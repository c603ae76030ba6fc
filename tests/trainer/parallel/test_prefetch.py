"""Weights that are gathered ahead are never used after they have changed."""

from __future__ import annotations

from pathlib import Path

import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import Evaluation, World


class Helped(nn.Module):
    """Its last block is a head for training alone: an evaluation gathers weights for it and does not run it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 2)
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks[:2]:
            x = torch.tanh(block(x))
        y = self.last(x)
        return y + 0.3 * self.last(torch.tanh(self.blocks[2](x))) if self.training else y


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]) - 0.5).square().sum(), len(batch["x"])


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    return {"loss": (model(batch["x"]).square().sum(), len(batch["x"]))}


def train(world: World, folder: str, zero: int) -> torch.Tensor:
    model = Helped()
    with make_trainer(
        world,
        f"{folder}/{world.world_size}-{zero}",
        rows(world, "drop"),
        model,
        loss=loss,
        steps=6,
        ema={"decay": 0.99},
        evaluate={"every": 1},
        evaluation=Evaluation(batches=rows(world, "pad"), metrics=measure),
        parallel={"zero": zero},
    ) as trainer:
        trainer.train()
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
        return torch.cat([one.detach().flatten() for one in whole])


def train_all(world: World, folder: str) -> list[torch.Tensor]:
    return [train(world, folder, zero) for zero in (1, 2, 3)]


def test_a_block_that_evaluation_leaves_out_trains_on_with_its_own_weights(tmp_path: Path) -> None:
    expected = run_ranks(train, 1, str(tmp_path), 0)[0]
    for stages in run_ranks(train_all, 2, str(tmp_path)):
        for zero, found in enumerate(stages, 1):
            assert torch.allclose(found, expected, atol=1e-6), zero
