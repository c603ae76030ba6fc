"""A rank that torchrun starts: trains on the device it is told, resumes, and rank 0 prints what came of it.

Arguments: "cpu" or "cuda", an empty folder, and the options of the config as JSON.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    Evaluation,
    TrainerConfig,
    World,
    close_world,
    open_world,
)
from penstock.trainer.options import build_config

ROWS, BATCH = 96, 24


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.out = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.out(x).float().squeeze(1)


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"])


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, tuple[torch.Tensor, int]]:
    return {"loss": ((model(batch["x"]) - batch["y"]).square().sum(), len(batch["x"]))}


def make_loader() -> ArrayLoader:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(ROWS, 8, generator=draw)
    return ArrayLoader({"x": x, "y": x.sum(1)}, global_batch_size=BATCH)


def train(world: World, folder: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """The weights, the metrics and the losses after eight steps, of which the last four are a resumed run's."""
    values = {
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "checkpoint": {"every_steps": 2},
        "report": {"quiet": True, "every": 1},
        **options,
    }
    for steps in (4, 8):
        trainer = DistributedTrainer(
            Net(),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            make_loader(),
            build_config(TrainerConfig, {"steps": steps, **values}),
            loss=loss,
            evaluation=Evaluation(batches=make_loader(), metrics=measure),
            world=world,
        )
        with trainer:
            summary = trainer.train()
            metrics = trainer.evaluate() or {}
            whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in trainer.parallel.inner.parameters()]
            flat = torch.cat([one.detach().flatten().cpu() for one in whole])
    return {"weights": flat.tolist(), "loss": metrics["loss"], "steps": summary.steps}


if __name__ == "__main__":
    try:
        here = open_world(device=sys.argv[1])
        found = train(here, sys.argv[2], json.loads(sys.argv[3]))
        if here.is_first:
            print("FOUND", json.dumps(found | {"device": here.device.type}), flush=True)
    finally:
        close_world()
