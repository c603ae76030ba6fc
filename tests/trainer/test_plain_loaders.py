"""Runs on loaders that have no state to save: an epoch that was trained is not trained again."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, square
from torch import nn
from torch.utils.data import DataLoader

from penstock.trainer import Evaluation, World

Batch = dict[str, torch.Tensor]


class Streamed:
    """Four batches, without a length."""

    def __iter__(self) -> Iterator[Batch]:
        for number in range(4):
            yield {"x": torch.full((6, 2), float(number)), "number": torch.full((6,), float(number))}


class Listed(Streamed):
    def __len__(self) -> int:
        return 4


class Longer(Listed):
    """It has a batch more than it says."""

    def __iter__(self) -> Iterator[Batch]:
        yield from super().__iter__()
        yield {"x": torch.full((6, 2), 4.0), "number": torch.full((6,), 4.0)}


def load() -> DataLoader[Any]:
    samples = [{"x": torch.full((2,), float(row)), "number": torch.tensor(float(row // 6))} for row in range(24)]
    return DataLoader(samples, batch_size=6)  # type: ignore[arg-type]


def train(world: World, folder: str, loader: Any, **options: Any) -> tuple[Any, list[float]]:
    seen: list[float] = []

    def loss(model: nn.Module, batch: Batch) -> tuple[torch.Tensor, int]:
        seen.append(batch["number"][0].item())
        if len(seen) == options.get("stop_at"):
            os.kill(os.getpid(), signal.SIGTERM)
        return square(model, batch)

    options = {"steps": None, "epochs": 1, "loss": loss, **options}
    given = {key: value for key, value in options.items() if key != "stop_at"}
    with make_trainer(world, folder, loader, **given) as trainer:
        return trainer.train(), seen


@pytest.mark.parametrize("every", [3, 4])
@pytest.mark.parametrize("make", [load, Listed, Streamed])
def test_a_finished_run_that_is_started_again_is_finished(world: World, tmp_path: Path, make: Any, every: int) -> None:
    options = {"epochs": 2, "checkpoint": {"every_steps": every}}
    found, seen = train(world, str(tmp_path), make(), **options)
    assert (found.steps, found.epochs, seen) == (8, 2, [0, 1, 2, 3] * 2)
    found, seen = train(world, str(tmp_path), make(), **options)
    assert (found.steps, found.epochs, seen) == (8, 2, [])
    found, seen = train(world, str(tmp_path), make(), **{**options, "epochs": 3})
    assert (found.steps, found.epochs, seen) == (12, 3, [0, 1, 2, 3])


@pytest.mark.parametrize("make", [Listed, Streamed])
def test_so_is_one_that_patience_ended(world: World, tmp_path: Path, make: Any) -> None:
    left = iter([3.0, 1.0, 2.0, 2.0])
    evaluation = Evaluation(
        batches=[{"x": torch.ones(1, 2)}], metrics=lambda *_: {"loss": (torch.tensor(next(left)), 1)}
    )
    options = {
        "epochs": 9,
        "evaluation": evaluation,
        "evaluate": {"best": "loss", "patience": 2},
        "checkpoint": {"every_steps": 4, "keep_best": 1},
    }
    found, _ = train(world, str(tmp_path), make(), **options)
    assert (found.steps, found.epochs, found.best, found.best_step) == (16, 4, 1.0, 8)
    found, seen = train(world, str(tmp_path), make(), **options)
    assert (found.steps, found.epochs, found.best, found.best_step, seen) == (16, 4, 1.0, 8, [])


def test_a_signal_in_an_epochs_last_step_does_not_begin_it_anew(world: World, tmp_path: Path) -> None:
    evaluation = Evaluation(batches=[{"x": torch.ones(1, 2)}], metrics=lambda *_: {"loss": (torch.tensor(1.0), 1)})
    options = {"evaluation": evaluation, "checkpoint": {"every_steps": 3}, "epochs": 2}
    found, _ = train(world, str(tmp_path), Listed(), stop_at=4, **options)
    assert (found.steps, found.stopped_early, found.metrics) == (4, True, {})
    found, seen = train(world, str(tmp_path), Listed(), **options)
    assert (found.steps, found.epochs, found.metrics, seen) == (8, 2, {"loss": 1.0}, [0, 1, 2, 3])


def test_a_loader_that_gives_more_than_it_says_loses_no_batch(world: World, tmp_path: Path) -> None:
    found, seen = train(world, str(tmp_path), Longer(), epochs=2, checkpoint={"every_steps": 2})
    assert (found.steps, found.epochs, seen) == (10, 2, [0, 1, 2, 3, 4] * 2)


def train_twice(world: World, folder: str) -> list[tuple[int, int]]:
    found = [train(world, folder, load(), checkpoint={"every_steps": 4})[0] for _ in range(2)]
    return [(one.steps, one.epochs) for one in found]


def test_all_ranks_end_where_they_were_done(tmp_path: Path) -> None:
    assert run_ranks(train_twice, 2, str(tmp_path)) == [[(4, 1)] * 2] * 2


def train_on(world: World, folder: str, kind: str) -> list[str]:
    rows = torch.arange(24.0).reshape(12, 2)
    batches: list[Any] = {
        "same": [{"x": rows}],
        "shared": [{"x": rows[world.rank :: 2]}],
        "sparse": [{"x": rows, "y": torch.eye(12).to_sparse(), "z": torch.ones(12, dtype=torch.complex64).conj()}],
        "empty": [{"x": rows[:0]}, {"x": rows}],
    }[kind]
    with make_trainer(world, folder, batches, steps=1) as trainer:
        trainer.train()
    path = Path(folder) / "metrics.jsonl"
    records = map(json.loads, path.read_text().splitlines()) if world.is_first else []
    return [one["note"] for one in records if one["kind"] == "note" and "the same first batch" in one["note"]]


@pytest.mark.parametrize(("kind", "is_told"), [("same", True), ("sparse", True), ("shared", False), ("empty", False)])
def test_a_loader_that_gives_all_ranks_the_same_samples_is_noted(tmp_path: Path, kind: str, is_told: bool) -> None:
    notes = run_ranks(train_on, 2, str(tmp_path), kind)[0]
    assert len(notes) == is_told
    if is_told:
        assert notes[0].startswith("all 2 ranks got the same first batch")
        assert notes[0].endswith("DistributedSampler with num_replicas=2 and rank=world.rank")
