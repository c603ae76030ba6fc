"""Runs of learners on real ranks, each in a world that its test chooses; every case returns plain data or tensors."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

import torch
from small_trainers import square
from torch import nn
from torch.distributed.tensor import DTensor

from penstock.trainer import ArrayLoader, DistributedTrainer, Evaluation, TrainerConfig, World
from penstock.trainer.options import build_config

ROWS, GLOBAL_BATCH = 46, 8  # the last of six batches has six rows
FIRST, SECOND = ("first.weight", "first.bias"), ("second.weight", "second.bias")

Weights = dict[str, torch.Tensor]


class Pair(nn.Module):
    """Two layers of one size, so that two fragments are one layer each; ``apart``: neither layer sees the other."""

    def __init__(self, *, apart: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.apart = apart

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.apart:
            return torch.cat([self.first(x), self.second(x)], 1)
        return self.second(torch.tanh(self.first(x)))


class Normed(nn.Module):
    """A batch norm between two layers; batches of one row have no variance, and are left out of its statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.norm(self.first(x)))


def load(world: World | tuple[int, int], count: int = ROWS) -> ArrayLoader:
    """The rows of one rank, by its world or by (rank, world size)."""
    rank, world_size = (world.rank, world.world_size) if isinstance(world, World) else world
    generator = torch.Generator().manual_seed(5)
    rows = torch.randn(count, 4, generator=generator)
    return ArrayLoader(
        {"x": rows},
        global_batch_size=GLOBAL_BATCH,
        last_batch="partial",
        seed=1,
        rank=rank,
        world_size=world_size,
        with_ids=True,
    )


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.02)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def open_trainer(
    world: World,
    folder: str,
    diloco: Mapping[str, Any] | None = None,
    *,
    model: nn.Module | None = None,
    optimizer: Any = adam,
    loss: Any = square,
    evaluation: Evaluation | None = None,
    observers: Any = (),
    zero: int = 0,
    rows: int = ROWS,
    **options: Any,
) -> DistributedTrainer:
    """A trainer of ``Pair`` in which ``diloco`` is that table, or without it gradients are exchanged at each step."""
    parallel = {"zero": zero, **({} if diloco is None else {"mode": "diloco", "diloco": dict(diloco)})}
    values = {
        "steps": 12,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True, "every": 1},
        "checkpoint": {"every_steps": 0},
        "parallel": parallel,
        **options,
    }
    return DistributedTrainer(
        Pair() if model is None else model,
        optimizer,
        load(world, rows),
        build_config(TrainerConfig, values),
        loss=loss,
        evaluation=evaluation,
        observers=observers,
        world=world,
    )


def whole_state(trainer: DistributedTrainer) -> Weights:
    """Copies of a trainer's weights and buffers, whole; a collective where they are sharded."""
    found = trainer.parallel.inner.state_dict()
    return {
        name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone() for name, one in found.items()
    }


def train(world: World, folder: str, diloco: Mapping[str, Any] | None = None, **options: Any) -> Weights:
    """Train to the end; returns what the model is then."""
    with open_trainer(world, folder, diloco, **options) as trainer:
        trainer.train()
        return whole_state(trainer)


class Records(list[Any]):
    """Keeps the records of steps, and the notes."""

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind in ("train", "note"):
            self.append({"kind": kind, "step": step, **values})

    def close(self) -> None:
        pass


def train_and_listen(world: World, folder: str, diloco: Mapping[str, Any] | None, **options: Any) -> Any:
    records = Records()
    weights = train(world, folder, diloco, observers=[records], **options)
    return weights, list(records)


class Killed:
    """A loss that ends its process with SIGKILL in a step, counted from 1."""

    def __init__(self, world: World, step: int) -> None:
        self._left, self._dies = step, world.rank == 1

    def __call__(self, model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        self._left -= 1
        if not self._left and self._dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return square(model, batch)


def train_until_killed(world: World, folder: str, diloco: Mapping[str, Any], step: int, options: Any) -> None:
    train(world, folder, diloco, loss=Killed(world, step), **options)
