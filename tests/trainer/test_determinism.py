"""Deterministic kernels within training alone, and refusals by name."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_trainers import Line, make_trainer, rows, square
from torch import nn

from penstock.trainer import Evaluation, TrainerConfig, TrainerConfigError, World, seed_all


def flags() -> tuple[bool, bool, bool]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


@pytest.fixture(autouse=True)
def workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")


def test_training_and_evaluation_use_deterministic_kernels_and_nothing_else_does(world: World, tmp_path: Path) -> None:
    seen = []

    def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        seen.append(flags())
        return square(model, batch)

    def metrics(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        total, count = loss(model, batch)
        return {"loss": (total, count)}

    before = flags()
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=metrics)
    with make_trainer(world, str(tmp_path), loss=loss, evaluation=evaluation, deterministic=True) as trainer:
        trainer.train()
        trained = len(seen)
        trainer.evaluate()
    assert set(seen) == {(True, True, False)}
    assert len(seen) > trained > 0
    assert flags() == before


class Unsettled(Line):
    """Uses an operation that has no deterministic kernel on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.zeros(len(x), dtype=torch.int64)
        torch.zeros(1).put_(index, torch.arange(float(len(x))), accumulate=False)
        return super().forward(x)


def test_an_operation_without_a_deterministic_kernel_is_refused_by_name(world: World, tmp_path: Path) -> None:
    before = flags()
    with (
        make_trainer(world, str(tmp_path), model=Unsettled(), deterministic=True) as trainer,
        pytest.raises(TrainerConfigError, match=r"deterministic=True: an operation has no .* Torch says: put_"),
    ):
        trainer.train()
    assert flags() == before
    assert trainer.progress.updates == 0


def test_an_environment_that_keeps_cublas_from_it_is_refused(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with (
        make_trainer(world, str(tmp_path), deterministic=True) as trainer,
        pytest.raises(TrainerConfigError, match=r"CUBLAS_WORKSPACE_CONFIG=':0:0' in the environment"),
    ):
        trainer.train()


def test_shares_by_measured_times_are_not_deterministic() -> None:
    with pytest.raises(TrainerConfigError, match="deterministic=True with shares='auto'"):
        TrainerConfig(steps=1, shares="auto", deterministic=True)


def test_seeding_all_makes_all_generators_draw_the_same_again() -> None:
    def draw() -> list[float]:
        seed_all(7)
        return [float(torch.rand(())), float(np.random.rand()), random.random()]

    assert draw() == draw()
