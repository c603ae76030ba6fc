"""Losses and metrics are sums in fp32 of what a model returns, however its weights are spread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer
from torch import nn

from penstock.trainer import ArrayLoader, Callbacks, Evaluation, StepRecord, World

ROWS = 512


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"], reduction="sum"), len(batch["y"])


def measure(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    total, count = loss(model, batch)
    return {"loss": (total, count)}


class Losses(Callbacks):
    def __init__(self) -> None:
        self.found: list[float] = []

    def on_step(self, record: StepRecord) -> None:
        self.found.append(record.loss)


def train(world: World, folder: str, dtype: str, zero: int) -> tuple[list[float], float]:
    """The losses of the steps on rank 0, and that of an evaluation, of the example that docs/trainer.md begins with."""
    torch.manual_seed(0)
    x, y = torch.randn(ROWS, 16), torch.randint(0, 4, (ROWS,))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    loader = ArrayLoader({"x": x, "y": y}, global_batch_size=256, rank=world.rank, world_size=world.world_size)
    losses = Losses()
    with make_trainer(
        world,
        f"{folder}/{zero}",
        loader,
        model,
        loss=loss,
        evaluation=Evaluation(batches=[{"x": x[:257], "y": y[:257]}], metrics=measure),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        observers=[losses],
        precision={"dtype": dtype},
        parallel={"zero": zero},
        steps=8,
    ) as trainer:
        trainer.train()
        return losses.found, trainer.evaluate()["loss"]


def train_all(world: World, folder: str, dtype: str) -> list[tuple[list[float], float]]:
    return [train(world, folder, dtype, zero) for zero in (0, 1, 2, 3)]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_losses_and_metrics_of_all_zero_stages_agree_to_rounding(tmp_path: Any, dtype: str) -> None:
    whole, *sharded = run_ranks(train_all, 2, str(tmp_path), dtype)[0]
    for zero, (losses, metric) in enumerate(sharded, start=1):
        assert losses[0] == pytest.approx(whole[0][0], rel=1e-6), zero  # of the same weights
        assert losses == pytest.approx(whole[0], rel=1e-5), zero
        assert metric == pytest.approx(whole[1], rel=1e-5), zero


@dataclass
class Scores:
    scores: torch.Tensor
    places: torch.Tensor


class Various(nn.Module):
    """Returns tensors of several formats, in several structures."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        for block in self.blocks:
            x = block(x)
            self.seen.append(x.dtype)
        found = x.argmax(1)
        return {"pair": (x, found), "scores": Scores(x, found), "flags": x > 0, "note": "text", "none": None}


def look_at_outputs(world: World, folder: str, dtype: str) -> list[Any]:
    model, seen = Various(), []

    def total(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        found = model(batch["x"])
        values, places = found["pair"]
        told = found["scores"]
        seen.append([one.dtype for one in (values, told.scores, places, told.places, found["flags"])])
        seen.append([found["note"], found["none"]])
        return values.sum() + told.scores.sum(), len(values)

    with make_trainer(
        world, folder, model=model, loss=total, precision={"dtype": dtype}, parallel={"zero": 3}
    ) as trainer:
        trainer.train()
    return [seen[0], seen[1], model.seen[0]]


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_only_floating_point_that_leaves_the_whole_model_becomes_fp32(tmp_path: Any, dtype: str) -> None:
    for formats, others, inside in run_ranks(look_at_outputs, 2, str(tmp_path), dtype):
        assert formats == [torch.float32, torch.float32, torch.int64, torch.int64, torch.bool]
        assert others == ["text", None]
        assert inside == {"bf16": torch.bfloat16, "fp16": torch.float16}[dtype]
