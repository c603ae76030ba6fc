"""Runs that go back, and the same runs that jumped over the batches in question."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from small_trainers import Line
from torch import nn

from penstock.trainer import (
    ArrayLoader,
    Callbacks,
    DistributedTrainer,
    Evaluation,
    LossSpikeError,
    TrainerConfig,
    World,
)
from penstock.trainer.options import build_config

GLOBAL_BATCH, ROWS = 6, 240  # 40 steps an epoch


SPIKE = {"on_spike": "rewind", "window": 8, "threshold": 40.0, "skip_batches": 2}
CHECKPOINT = {"every_steps": 4, "keep_last": 99}


def arrays() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = 1.0 + 0.05 * torch.randn(ROWS, 2, generator=generator)
    return {"x": x, "number": torch.arange(ROWS)}


def load(world: World, **options: Any) -> ArrayLoader:
    options = {"global_batch_size": GLOBAL_BATCH, "rank": world.rank, "world_size": world.world_size, **options}
    return ArrayLoader(arrays(), shuffle=False, **options)


def batches_to_rows(*batches: int) -> tuple[int, ...]:
    """The first row of each of these global batches."""
    return tuple(GLOBAL_BATCH * batch for batch in batches)


def going_back(folder: str) -> dict[str, Any]:
    """Options of a run that keeps checkpoints in ``folder`` and goes back past the one before the spike."""
    return {"checkpoint": {**CHECKPOINT, "folder": folder}, "spike": {**SPIKE, "margin": 5}}


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def fall(update: int, total: int) -> float:
    """A rate that is another at each update, however long the run is."""
    return 1 / (1 + 0.1 * update)


@dataclass
class Run:
    """One run of a trainer: the first rows of its global batches by step, and what it ended with."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    state: dict[str, list[float]] = field(default_factory=dict)
    average: dict[str, list[float]] = field(default_factory=dict)
    error: str = ""
    rewinds: int = 0


def state_of(model: nn.Module) -> dict[str, list[float]]:
    found = getattr(model, "module", model).state_dict()
    return {name: getattr(one, "full_tensor", lambda one=one: one)().flatten().tolist() for name, one in found.items()}


def train(
    world: World,
    folder: str | Path,
    *,
    steps: int | None,
    bad: tuple[int, ...] = (),
    factor: float = 1e3,
    loader: Any = None,
    before: Any = None,
    fail_at: tuple[int, int] | None = None,
    observers: Sequence[Callbacks] = (),
    optimizer: Any = adam,
    **options: Any,
) -> Run:
    """Train to ``steps``; in epoch 0 batches with a row in ``bad`` have a loss that is ``factor`` times as high."""
    found = Run()

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        first = int(batch["number"].min())
        found.steps.append((trainer.progress.step, first))
        if (trainer.progress.step, trainer.progress.rewinds) == fail_at:
            raise ZeroDivisionError
        is_bad = trainer.progress.epoch == 0 and torch.isin(batch["number"], torch.tensor(bad)).any()
        total = (model(batch["x"].float()).float() - 1.0).square().sum()
        return total * (factor if is_bad else 1.0), len(batch["x"])

    def look(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        model(batch["x"])
        found.average = state_of(model)
        return {"loss": (torch.tensor(1.0), 1)}

    values = {
        "steps": steps,
        "output_dir": str(folder),
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True, "every": 3},
        "checkpoint": CHECKPOINT,
        "spike": SPIKE,
        "ema": {"decay": 0.9},
        "evaluate": {"every": 1000},
        **options,
    }
    torch.manual_seed(1)
    with DistributedTrainer(
        nn.Sequential(Line(), nn.Dropout(0.1), nn.Linear(2, 1)),
        optimizer,
        load(world) if loader is None else loader,
        build_config(TrainerConfig, values),
        loss=loss,
        evaluation=Evaluation(batches=[{"x": torch.ones(1, 2)}], metrics=look),
        observers=observers,
        world=world,
    ) as trainer:
        if before is not None:
            before(trainer)
        try:
            found.rewinds = trainer.train().rewinds
        except (LossSpikeError, ZeroDivisionError) as exc:
            found.error = str(exc) or type(exc).__name__
        found.state = state_of(trainer.parallel.inner)
        trainer.evaluate()
    return found


def records(folder: str | Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]
