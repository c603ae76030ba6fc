"""A run that resumes with a model of other number formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import Line, make_trainer
from torch import nn

from penstock.trainer import World
from penstock.trainer.errors import CheckpointMismatchError


class Counted(Line):
    """A line of some format, with a buffer of another."""

    def __init__(self, dtype: torch.dtype, seen: torch.dtype) -> None:
        super().__init__()
        self.line.to(dtype)
        self.register_buffer("seen", torch.zeros(2, dtype=seen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.to(self.line.weight.dtype))


def train(world: World, folder: Path, steps: int, model: nn.Module, zero: int = 0) -> list[str]:
    """Train up to a step, and return the notes of all so far."""
    options: dict[str, Any] = {"steps": steps, "checkpoint": {"every_steps": 2}, "parallel": {"zero": zero}}
    with make_trainer(world, str(folder), model=model, **options) as trainer:
        trainer.train()
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one["note"] for one in records if one["kind"] == "note"]


@pytest.mark.parametrize("zero", [0, 3])
def test_weights_and_buffers_of_another_format_are_noted_where_they_are_converted(
    world: World, tmp_path: Path, zero: int
) -> None:
    train(world, tmp_path, 2, Counted(torch.float64, torch.int64), zero)
    notes = train(world, tmp_path, 4, Counted(torch.float32, torch.int32), zero)
    told = [note for note in notes if "converted" in note]
    assert len(told) == 2
    assert any("line.weight, line.bias: float32 in this model, float64 in the checkpoint" in note for note in told)
    assert any("seen: int32 in this model, int64 in the checkpoint" in note for note in told)


def test_the_same_formats_are_not_noted(world: World, tmp_path: Path) -> None:
    train(world, tmp_path, 2, Counted(torch.float32, torch.int64))
    assert not any("converted" in note for note in train(world, tmp_path, 4, Counted(torch.float32, torch.int64)))


@pytest.mark.parametrize(("then", "now"), [(torch.float32, torch.int64), (torch.complex64, torch.float32)])
def test_what_would_lose_its_fraction_or_imaginary_part_is_of_another_model(
    world: World, tmp_path: Path, then: torch.dtype, now: torch.dtype
) -> None:
    train(world, tmp_path, 2, Counted(torch.float32, then))
    with pytest.raises(CheckpointMismatchError, match=rf"seen is of {then} there and {now} here"):
        train(world, tmp_path, 4, Counted(torch.float32, now))
