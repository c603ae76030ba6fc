"""A line as a model, rows as its data, and trainers of both: for tests of one rank or several."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    TrainerConfig,
    World,
)
from penstock.trainer.options import build_config

ROWS = 23


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.line.weight.data = torch.tensor([[0.25, 0.5], [-0.75, 1.0]])
        nn.init.constant_(self.line.bias, 0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def square(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).float().square().sum(), len(batch["x"])


def add_up(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The sum of the row numbers and of their squares: right only if each row counts once."""
    model(batch["x"])
    valid = batch.get("__valid__", torch.ones(len(batch["x"]), dtype=torch.bool))
    numbers = batch["number"] * valid
    return {"number": (numbers.sum(), valid.sum()), "square": (numbers.square().sum(), torch.tensor(1.0) / 3)}


def rows(world: World, last_batch: str = "partial", size: int = 6, **arguments: Any) -> ArrayLoader:
    numbers = torch.arange(1.0, ROWS + 1)
    x = torch.stack([numbers, -numbers], 1) / ROWS
    arguments = {"last_batch": last_batch, "rank": world.rank, "world_size": world.world_size, **arguments}
    return ArrayLoader({"x": x, "number": numbers}, global_batch_size=size, **arguments)


def make_trainer(world: World, folder: str, loader: Any = None, model: nn.Module | None = None, **options: Any) -> Any:
    loss = options.pop("loss", square)
    evaluation = options.pop("evaluation", None)
    initialise = options.pop("initialise", None)
    optimizer = options.pop("optimizer", lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    observers = options.pop("observers", ())
    report = {"quiet": True, "every": 1}
    values = {"steps": 4, "output_dir": folder, "precision": {"dtype": "fp32"}, "report": report, **options}
    return DistributedTrainer(
        Line() if model is None else model,
        optimizer,
        rows(world) if loader is None else loader,
        build_config(TrainerConfig, values),
        loss=loss,
        evaluation=evaluation,
        observers=observers,
        world=world,
        initialise=initialise,
    )


class Steep(torch.autograd.Function):
    """The identity, with a slope of its own."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient * ctx.saved_tensors[0], None


def cliff(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """A finite loss, with an infinite gradient where row 9 is."""
    total, count = square(model, batch)
    return Steep.apply(total, torch.where(batch["number"] == 9, torch.inf, 1.0).max()), count
