"""One run over several worlds: 3 ranks, then 2, then 4, each with another zero stage."""

from __future__ import annotations

from typing import Any

import torch
from parity_cases import data, loss, make_model
from torch import nn

from penstock.trainer import ArrayLoader, DistributedTrainer, TrainerConfig, World
from penstock.trainer.options import build_config

CHAIN = ((3, 3), (2, 1), (4, 0))


class ListingTrainer(DistributedTrainer):
    """Keeps the sample ids of each of this rank's steps."""

    ids: list[list[int]]

    def train_and_list_ids(self) -> list[list[int]]:
        self.train()
        return self.ids


def train_link(folder: str, world: World, zero: int, *, steps: int) -> ListingTrainer:
    ids: list[list[int]] = []

    def list_and_lose(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        ids.append(batch["__id__"].tolist())
        return loss(model, batch)

    options: dict[str, Any] = {
        "steps": steps,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "parallel": {"zero": zero},
        "schedule": {"warmup_steps": 4},
        "checkpoint": {"every_steps": 3},
        "report": {"quiet": True},
    }
    trainer = ListingTrainer(
        make_model(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        ArrayLoader(
            data(),
            global_batch_size=10,
            last_batch="partial",
            with_ids=True,
            rank=world.rank,
            world_size=world.world_size,
        ),
        build_config(TrainerConfig, {**options, "epochs": 3}),
        loss=list_and_lose,
        world=world,
    )
    trainer.ids = ids
    return trainer
