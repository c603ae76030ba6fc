"""Buffers that no checkpoint holds are told of where training changes them, and caches are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, make_trainer, rows
from torch import nn

from penstock.trainer import World


class Counting(nn.Module):
    """Decides by how often it ran what it gives."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.line, self.how = Line(), how
        self.register_buffer("seen", torch.zeros(()), persistent=how == "saved")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "assigned":
            self.seen = self.seen + 1
        else:
            self.seen += 1
        return self.line(x) / self.seen


class Caching(nn.Module):
    """Has a table that is made when it is first used, one that grows, and one that stays."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.calls = Line(), 0
        self.register_buffer("made", torch.zeros(2), persistent=False)
        self.register_buffer("late", None, persistent=False)
        self.register_buffer("grown", torch.ones(1), persistent=False)
        self.register_buffer("wide", torch.ones(2).expand(3, 2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.made.fill_(1.0)
        if self.calls == 3:
            self.late = torch.ones(2)
        self.grown = torch.arange(1.0, self.calls + 1)
        return self.line(x) * self.made * self.grown[0]


class CountingSgd(torch.optim.SGD):
    """Divides its rate by the number of its steps, which it keeps as an attribute."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        self.steps += 1
        for group in self.param_groups:
            for one in group["params"]:
                if one.grad is not None:
                    one.data.sub_(one.grad, alpha=group["lr"] / self.steps)


def counting_sgd(parameters: Any) -> CountingSgd:
    return CountingSgd(parameters, lr=0.1)


def notes(folder: Path) -> list[str]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [one["note"] for one in records if one["kind"] == "note" and "training changes" in one["note"]]


def train(world: World, folder: str, model: nn.Module, **options: Any) -> None:
    values = {"steps": 6, "checkpoint": {"every_steps": 2}, **options}
    with make_trainer(world, folder, rows(world, "drop"), model, **values) as trainer:
        trainer.train()


def train_counting(world: World, folder: str, how: str, options: dict[str, Any]) -> None:
    train(world, folder, Counting(how), **options)


@pytest.mark.parametrize("how", ["added", "assigned"])
def test_buffers_that_training_changes_and_no_checkpoint_holds_are_named_once(
    world: World, tmp_path: Path, how: str
) -> None:
    train(world, str(tmp_path), Counting(how))
    assert len(notes(tmp_path)) == 1
    assert "they are registered with persistent=False: seen. A resumed run" in notes(tmp_path)[0]


def test_so_are_numbers_that_an_optimizer_keeps_as_attributes(world: World, tmp_path: Path) -> None:
    train(world, str(tmp_path), Line(), optimizer=counting_sgd)
    assert len(notes(tmp_path)) == 1
    assert "attributes of optimizer=CountingSgd that no checkpoint has: steps. A resumed" in notes(tmp_path)[0]


@pytest.mark.parametrize("options", [{}, {"parallel": {"zero": 3}}])
def test_so_are_they_on_several_ranks(tmp_path: Path, options: dict[str, Any]) -> None:
    run_ranks(train_counting, 2, str(tmp_path), "added", options)
    assert len(notes(tmp_path)) == 1


@pytest.mark.slow
def test_a_save_at_every_step_tells_at_the_second(world: World, tmp_path: Path) -> None:
    train(world, str(tmp_path), Counting("added"), checkpoint={"every_steps": 1}, steps=1)
    assert notes(tmp_path) == []
    train(world, str(tmp_path), Counting("added"), checkpoint={"every_steps": 1}, steps=3)
    assert len(notes(tmp_path)) == 1


@pytest.mark.parametrize("make", [Caching, lambda: Counting("saved"), Line])
def test_caches_and_what_is_saved_are_not_named(world: World, tmp_path: Path, make: Any) -> None:
    train(world, str(tmp_path), make())
    assert notes(tmp_path) == []


def test_a_run_without_checkpoints_does_not_look(world: World, tmp_path: Path) -> None:
    train(world, str(tmp_path), Counting("added"), checkpoint={})
    assert notes(tmp_path) == []
