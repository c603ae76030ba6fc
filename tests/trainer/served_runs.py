"""Small recipes for runs on a parameter server, and what their workers see; modules by import path, as recipes name."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from penstock.trainer import (
    ArrayLoader,
    DistributedTrainer,
    PrecisionConfig,
    ReportConfig,
    ServerEmbedding,
    TrainerConfig,
    World,
    seed_all,
)
from penstock.trainer.options import build_config
from penstock.trainer.recipes.recipe import Recipe, build_recipe

ROWS, FEATURES, IDS = 6, 5, 12
MODULE = "served_runs"


class Net(nn.Module):
    """Two layers, of which each worker makes the same."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 7), nn.Tanh(), nn.Linear(7, 1))

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.layers(batch["x"])
        return out.squeeze(1)


class NoisyNet(Net):
    """With dropout, which draws by step and learner."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 2), nn.Linear(2, 1)
        )


class TableNet(nn.Module):
    """A dense layer over the sum of two looked up rows; ``is_served``: of a table on servers."""

    def __init__(self, is_served: bool = True, looks_up: bool = True) -> None:
        super().__init__()
        self.table = ServerEmbedding("words", 4, seed=3, scale=0.5)
        if looks_up:
            self.lookups = lambda batch: {"words": batch["ids"]}
        if not is_served:
            self.table = nn.Embedding.from_pretrained(self.table.spec.first_rows(torch.arange(IDS).numpy()), False)  # type: ignore[assignment]
        self.out = nn.Linear(4, 1)

    def forward(self, batch: Mapping[str, Tensor]) -> Tensor:
        out: Tensor = self.out(self.table(batch["ids"]).sum(1))
        return out.squeeze(1)


class Tally(nn.Module):
    """A number for each batch of an epoch, which its gradient lowers by 1 where the rate is 1."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.counts = nn.Parameter(torch.zeros(batches))


class Tallies(nn.Module):
    """The same in tensors of their own, which lie in several buckets."""

    def __init__(self, batches: int) -> None:
        super().__init__()
        self.counts = nn.ParameterList(nn.Parameter(torch.zeros(1)) for _ in range(batches))


def make_batches(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "x": torch.randn(ROWS, FEATURES, generator=generator),
            "ids": torch.randint(0, IDS, (ROWS, 2), generator=generator),
            "y": torch.randn(ROWS, generator=generator),
            "place": torch.tensor(place),
        }
        for place in range(count)
    ]


def make_rows(
    count: int,
    batch_size: int | None = None,
    global_batch_size: int | None = None,
    rank: int | None = None,
    world_size: int | None = None,
) -> ArrayLoader:
    """Rows of which each rank gets its part of a batch."""
    generator = torch.Generator().manual_seed(5)
    arrays = {
        "x": torch.randn(count, FEATURES, generator=generator),
        "y": torch.randn(count, generator=generator),
    }
    sizes = {"batch_size": batch_size, "global_batch_size": global_batch_size}
    return ArrayLoader(arrays, **sizes, seed=2, rank=rank, world_size=world_size)


def squares(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return (model(batch) - batch["y"]).square().sum(), len(batch["y"])


def count_once(model: Tally, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return model.counts[batch["place"]], 1


def count_in_one(model: Tallies, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    return model.counts[int(batch["place"])].sum(), 1


def count_apart(model: Tallies, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    rest = torch.stack([one.sum() for one in model.counts]).sum() * 0  # each has a gradient
    return model.counts[int(batch["place"])].sum() + rest, 1


def mean_square(model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
    total, count = squares(model, batch)
    return {"loss": (total, count)}


def train_ranks(world: World, folder: str, workers: int, batches: int) -> dict[str, Tensor]:
    """Train the small net by all-reduce, each rank on the batches that a synchronous worker of its number gets."""
    seed_all(0)
    own = make_batches(batches)[world.rank :: workers]
    config = TrainerConfig(
        epochs=1,
        output_dir=folder,
        precision=PrecisionConfig(dtype="fp32"),
        report=ReportConfig(quiet=True),
    )
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    with DistributedTrainer(Net(), optimizer, own, config, loss=squares, world=world) as trainer:
        trainer.train()
        return {name: one.detach().clone() for name, one in trainer.parallel.inner.named_parameters()}


def train_learners(world: World, folder: str, batches: int, every: int) -> dict[str, Tensor]:
    """Train learners of one rank by all-reduce, each on the batches that a synchronous one over servers gets."""
    seed_all(0)
    leases = [make_batches(batches)[first : first + every] for first in range(0, batches, every)]
    own = [batch for lease in leases[world.rank :: world.world_size] for batch in lease]
    values = {
        "epochs": 1,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True},
        "checkpoint": {"every_steps": 0},
        "schedule": {"shape": "cosine", "warmup_steps": 2},
        "parallel": {"mode": "diloco", "diloco": {"every": every}},
    }
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    config = build_config(TrainerConfig, values)
    with DistributedTrainer(NoisyNet(), optimizer, own, config, loss=squares, world=world) as trainer:
        trainer.train()
        learners = trainer._saver.learners
        assert learners is not None
        return {name: one.detach().clone() for name, one in learners._outer.weights.items()}


def train_rows(world: World, folder: str, count: int, batch: int, zero: int) -> dict[str, Tensor]:
    """Train on all ranks as one replica, or its shards."""
    seed_all(0)
    values = {
        "epochs": 2,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True},
        "checkpoint": {"every_steps": 0},
        "step": {"clip_norm": 0.5},
        "parallel": {"zero": zero},
    }
    rows = make_rows(count, global_batch_size=batch, rank=world.rank, world_size=world.world_size)
    optimizer = partial(torch.optim.AdamW, lr=0.02)
    config = build_config(TrainerConfig, values)
    with DistributedTrainer(NoisyNet(), optimizer, rows, config, loss=squares, world=world) as trainer:
        trainer.train()
        found = trainer.parallel.inner.state_dict()
        return {
            name: (one.full_tensor() if isinstance(one, DTensor) else one).detach().clone()
            for name, one in found.items()
        }


def recipe_of(
    folder: object,
    *,
    batches: int = 12,
    model: str = "Net",
    model_args: Mapping[str, Any] | None = None,
    loss: str = "squares",
    optimizer: Mapping[str, Any] | None = None,
    evaluates: bool = False,
    data: Mapping[str, Any] | None = None,
    trainer: Mapping[str, Any] | None = None,
    **server: object,
) -> Recipe:
    tables: dict[str, Any] = {
        "model": {"use": f"{MODULE}:{model}", "args": dict(model_args or {})},
        "optimizer": dict(optimizer or {"use": "torch.optim:SGD", "args": {"lr": 0.05}}),
        "loss": {"use": loss if ":" in loss else f"{MODULE}:{loss}"},
        "data": dict(data or {"use": f"{MODULE}:make_batches", "args": {"count": batches}}),
        "trainer": {
            "epochs": 1,
            "output_dir": str(folder),
            "device": "cpu",
            "parallel": {"mode": "parameter_server"},
            "precision": {"dtype": "fp32"},
            "report": {"quiet": True, "every": 1},
            "server": {"policy": "bsp", **server},
            **(trainer or {}),
        },
    }
    if evaluates:
        data = {"use": f"{MODULE}:make_batches", "args": {"count": 3, "seed": 1}}
        tables["evaluation"] = {"use": f"{MODULE}:mean_square", "data": data}
    return build_recipe(tables)
