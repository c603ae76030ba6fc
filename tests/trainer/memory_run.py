"""A rank that torchrun starts: trains on a GPU of which it may take little memory, and prints what came of it.

Arguments: bytes of device memory that torch may take, an empty folder, and the options of the config as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, close_world, open_world
from penstock.trainer.options import build_config

ROWS, LENGTH, WIDTH = 32, 2048, 256


class Blocks(nn.Module):
    """Some 60 MB of activations a row of (2048, 256) values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.Tanh(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(6)]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean((1, 2))


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    wide = batch["x"][:, None, :].expand(-1, LENGTH, -1)
    return (model(wide) - batch["y"]).square().sum(), len(batch["x"])


def train(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(5)
    data = {"x": torch.randn(ROWS, WIDTH, generator=draw), "y": torch.rand(ROWS, generator=draw)}
    values = {"steps": 4, "output_dir": folder, "precision": {"dtype": "fp32"}, "report": {"quiet": True, "every": 1}}
    with DistributedTrainer(
        Blocks(),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.001),
        ArrayLoader(data, global_batch_size=ROWS),
        build_config(TrainerConfig, {**values, **options}),
        loss=loss,
    ) as trainer:
        trainer.train()
        flat = torch.cat([one.detach().flatten().cpu()[:50] for one in trainer.parallel.inner.parameters()])
        microbatches = trainer.state_dict().get("microbatches")
    return {"weights": flat.tolist(), "rows": microbatches and microbatches["rows"]}


if __name__ == "__main__":
    try:
        here = open_world(device="cuda")
        total = torch.cuda.get_device_properties(here.device).total_memory
        torch.cuda.set_per_process_memory_fraction(int(sys.argv[1]) / total, here.device)
        found = train(sys.argv[2], json.loads(sys.argv[3]))
        print("FOUND", json.dumps(found | {"peak": torch.cuda.max_memory_reserved(here.device)}), flush=True)
    finally:
        close_world()
