"""What is owed is of the mean loss of its own step, whatever the counts of the steps between."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
from launch_ranks import run_ranks
from small_trainers import make_trainer
from torch import nn

from penstock.trainer import ArrayLoader, Callbacks, StepRecord, World

RATE = 0.1
GLOBAL_BATCH = 64
ROWS = 2 * GLOBAL_BATCH + 1  # the last batch has one row: a correction by 64
WIDTH, OUTPUTS = 24, 12

SCHEMES: dict[str, dict[str, Any]] = {
    "int8": {"scheme": "int8"},
    "powersgd": {"scheme": "powersgd", "rank": 1},
    "topk": {"scheme": "topk", "momentum": 0.0, "density": 0.1},
}


class Bilinear(nn.Module):
    """Its loss is linear in its weights, so that gradients do not depend on them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, OUTPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def products(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return (model(batch["x"]) * batch["y"] * batch["counts"].unsqueeze(1)).sum(), batch["counts"].sum()


def arrays(uncounted_step: int | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    counts = torch.ones(ROWS)
    if uncounted_step is not None:
        counts[GLOBAL_BATCH * uncounted_step : GLOBAL_BATCH * (uncounted_step + 1)] = 0.0
    x, y = (torch.randn(ROWS, width, generator=generator) for width in (WIDTH, OUTPUTS))
    return {"x": x, "y": y, "counts": counts}


def sum_of_mean_gradients(data: dict[str, torch.Tensor], epochs: int, rows: int) -> torch.Tensor:
    """Over steps of so many rows."""
    total = torch.zeros(WIDTH, OUTPUTS, dtype=torch.float64)
    for start in range(0, ROWS, rows):
        x, y, counts = (data[name][start : start + rows].double() for name in ("x", "y", "counts"))
        total += (x * counts.unsqueeze(1)).T @ y / counts.sum().clamp(min=1.0)
    return epochs * total


class Updates(Callbacks):
    """The norm of each step's update over the rate, beside the norm that the step reports."""

    def __init__(self) -> None:
        self.model: nn.Module = nn.Module()
        self.before = torch.zeros(WIDTH, OUTPUTS)
        self.norms: list[tuple[float, float | None]] = []

    def on_step(self, record: StepRecord) -> None:
        after = self.model.get_parameter("weight").detach().clone()
        self.norms.append((float((self.before - after).norm()) / RATE, record.gradient_norm))
        self.before = after


def train(world: World, options: dict[str, Any], uncounted_step: int | None) -> tuple[float, list[Any]]:
    """How far what arrived and what is owed are from the sum of all gradients, relative to that; and ``Updates``."""
    data = arrays(uncounted_step)
    loader = ArrayLoader(
        data,
        global_batch_size=GLOBAL_BATCH,
        shuffle=False,
        last_batch="partial",
        rank=world.rank,
        world_size=world.world_size,
    )
    model, updates = Bilinear(), Updates()
    updates.model = model
    epochs = 3
    with (
        tempfile.TemporaryDirectory() as folder,
        make_trainer(
            world,
            folder,
            loader,
            model,
            loss=products,
            steps=None,
            epochs=epochs,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=RATE),
            observers=[] if "parallel" in options else [updates],
            **options,
        ) as trainer,
    ):
        trainer.train()
        weight = model.weight
        arrived = -(weight.full_tensor() if hasattr(weight, "full_tensor") else weight).detach().double() / RATE
        (owed,) = [one for name, one in trainer.compression.state_dict().items() if "owed" in name or "unsent" in name]
    owed = owed.double().reshape(WIDTH, OUTPUTS)  # rows come one after another, also in shards
    dist.all_reduce(owed)
    rows = GLOBAL_BATCH * options.get("step", {}).get("accumulate", 1)
    exact = sum_of_mean_gradients(data, epochs, rows)
    return float((arrived + owed / world.world_size - exact).norm() / exact.norm()), updates.norms


CASES: list[dict[str, Any]] = [
    *({"compression": scheme, "step": step} for scheme in SCHEMES.values() for step in ({}, {"microbatch": 5})),
    *({"compression": SCHEMES["int8"], "parallel": {"zero": zero}} for zero in (1, 2, 3)),
    *(
        {"compression": SCHEMES["int8"], "parallel": {"zero": zero}, "step": {"accumulate": 2, "microbatch": 7}}
        for zero in (1, 2, 3)
    ),
]


def train_all(world: World) -> list[tuple[float, list[Any]]]:
    return [train(world, case, uncounted) for case in CASES for uncounted in (None, 1)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_what_arrived_and_what_is_owed_are_all_gradients_whatever_the_counts(ranks: int) -> None:
    found = run_ranks(train_all, ranks)
    for index, (off, norms) in enumerate(found[0]):
        case = CASES[index // 2], index % 2
        assert off < 1e-5, (case, off)
        for updated, reported in norms:
            assert reported is None or reported == pytest.approx(updated, rel=1e-4), case
