"""The trainer on penstock's own loader: parquet rows, steps broken off anywhere, the last batch partial."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, make_trainer
from torch import nn

from penstock import DistributedDataLoader, TokenBudget, open_manifest
from penstock.loader import CostExpression, index_costs, write_costs
from penstock.trainer import NonFiniteLossError, TrainerConfigError, World

ROWS = 50  # five steps of two batches of at most six rows, the last batch of two


@pytest.fixture
def rows(tmp_path: Path) -> str:
    random = np.random.default_rng(1)
    table = pa.table({"a": random.normal(size=ROWS), "b": random.normal(size=ROWS)})
    (tmp_path / "data").mkdir()
    pq.write_table(table, tmp_path / "data" / "rows.parquet", row_group_size=8)
    return (tmp_path / "data").as_uri()


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    x = torch.stack([batch["a"], batch["b"]], 1).float()
    return model(x).square().sum(), len(x)


@contextmanager
def training(world: World, url: str, folder: Path, **options: Any) -> Iterator[tuple[Any, list[int]]]:
    ids: list[int] = []

    def list_and_lose(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        ids.extend(batch["__id__"].tolist())
        return loss(model, batch)

    arguments: dict[str, Any] = {"batch_size": 6, "last_batch": "partial", "with_ids": True, "cache_dir": None}
    with DistributedDataLoader(url, seed=2, rank=0, world_size=1, **arguments) as loader:
        options = {"loss": list_and_lose, "step": {"accumulate": 2}, "epochs": 3, **options}
        with make_trainer(world, str(folder), loader, Line(), **options) as trainer:
            yield trainer, ids


@pytest.mark.slow
@pytest.mark.parametrize("broken_at", [2, 5, 7, 10])
def test_training_on_the_loader_resumes_at_the_exact_sample(
    world: World, tmp_path: Path, rows: str, broken_at: int
) -> None:
    with training(world, rows, tmp_path / "whole", steps=None) as (whole, expected_ids):
        expected = whole.train()
        expected_weights = [parameter.detach().clone() for parameter in whole.parallel.inner.parameters()]
    assert sorted(expected_ids[:ROWS]) == list(range(ROWS))
    found_ids: list[int] = []
    for steps in (broken_at, None):
        options = {"steps": steps, "checkpoint": {"every_steps": 1}}
        with training(world, rows, tmp_path / "broken", **options) as (trainer, ids):
            summary = trainer.train()
            found_ids += ids
            weights = [parameter.detach().clone() for parameter in trainer.parallel.inner.parameters()]
    assert found_ids == expected_ids
    assert (summary.steps, summary.epochs, summary.samples) == (expected.steps, 3, 3 * ROWS)
    assert all(torch.equal(one, other) for one, other in zip(weights, expected_weights, strict=True))


def spoil_one_row(rows: str) -> int:
    """Make one value NaN where it lies, and return the row's sample id: its place in the data set."""
    path = Path(rows.removeprefix("file://")) / "rows.parquet"
    table = pq.read_table(path)
    values = table["a"].to_numpy().copy()
    values[20] = np.nan
    pq.write_table(table.set_column(0, "a", pa.array(values)), path, row_group_size=8)
    return 20


def test_a_nan_in_the_data_stops_with_the_step_and_the_ids_of_the_samples(
    world: World, tmp_path: Path, rows: str
) -> None:
    spoiled = spoil_one_row(rows)
    with training(world, rows, tmp_path, steps=None) as (trainer, ids), pytest.raises(NonFiniteLossError) as caught:
        trainer.train()
    found = re.match(r"step (\d+): .*microbatch (\d), sample ids \[([\d, ]+)\]", str(caught.value))
    assert found, caught.value
    step, microbatch, named = int(found[1]), int(found[2]), [int(word) for word in found[3].split(",")]
    assert spoiled in named
    place = ids.index(spoiled) // 6  # of the batch, of six samples each
    assert (step, microbatch) == divmod(place, 2)
    assert named == ids[6 * place : 6 * place + 6]
    assert all(bool(parameter.isfinite().all()) for parameter in trainer.parallel.inner.parameters())


@pytest.mark.slow
def test_a_nan_in_the_data_is_skipped_once_an_epoch_until_there_were_too_many(
    world: World, tmp_path: Path, rows: str
) -> None:
    spoil_one_row(rows)
    step = {"accumulate": 2, "on_nan": "skip", "max_skipped": 2}
    with training(world, rows, tmp_path / "two", steps=None, epochs=2, step=step) as (trainer, _):
        summary = trainer.train()
    assert (summary.non_finite, summary.updates, summary.steps) == (2, 8, 10)
    with (
        training(world, rows, tmp_path / "three", steps=None, epochs=3, step=step) as (trainer, _),
        pytest.raises(NonFiniteLossError, match=r"3 steps were skipped, and step\.max_skipped=2"),
    ):
        trainer.train()


def test_the_rate_follows_the_batch_size_of_the_loader(world: World, tmp_path: Path, rows: str) -> None:
    schedule = {"scaling": "linear", "base_batch_size": 3}
    with training(world, rows, tmp_path, steps=1, schedule=schedule) as (trainer, _):
        before = trainer.optimizer.param_groups[0]["lr"]
        trainer.train()
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(before * 6 * 2 / 3)  # two batches of six


BUDGET = TokenBudget(tokens=90, whole=True, index="n")


def weights_after_training(world: World, url: str, options: dict[str, Any]) -> tuple[list[list[float]], set[int]]:
    counts: set[int] = set()

    def count_and_lose(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
        counts.add(len(batch["a"]))
        return loss(model, batch)

    place: dict[str, Any] = {"rank": world.rank, "world_size": world.world_size, "seed": 2, "last_batch": "partial"}
    with (
        DistributedDataLoader(url, **place, **options) as loader,
        tempfile.TemporaryDirectory() as folder,
        make_trainer(world, folder, loader, Line(), loss=count_and_lose, steps=None, epochs=2) as trainer,
    ):
        trainer.train()
        return [parameter.flatten().tolist() for parameter in trainer.parallel.inner.parameters()], counts


def add_lengths(rows: str) -> None:
    """A column "n", and the index of it as costs."""
    path = Path(rows.removeprefix("file://")) / "rows.parquet"
    lengths = np.random.default_rng(3).integers(1, 30, ROWS)
    pq.write_table(pq.read_table(path).append_column("n", pa.array(lengths)), path, row_group_size=8)
    manifest = open_manifest(rows)
    write_costs(manifest, CostExpression.parse("n"), index_costs(manifest, "n"))


@pytest.mark.parametrize("told", [{"global_batch_size": 12, "cost": "n"}, {"batch_tokens": BUDGET, "bucket": "n"}])
def test_ranks_with_uneven_rows_train_the_model_of_one_rank(rows: str, told: dict[str, Any]) -> None:
    """Gradients are the mean over the global batch, however many rows of it a rank has."""
    add_lengths(rows)
    (alone, _), *_ = run_ranks(weights_after_training, 1, rows, told)
    found = run_ranks(weights_after_training, 3, rows, told)
    assert len(set.union(*(counts for _, counts in found))) > 2
    for weights, _ in found:
        for one, other in zip(weights, alone, strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def test_shares_by_speed_of_a_loader_that_bounds_ranks_rows_are_refused_before_the_first_step(
    world: World, tmp_path: Path, rows: str
) -> None:
    add_lengths(rows)
    with (
        DistributedDataLoader(rows, batch_tokens=BUDGET, rank=0, world_size=1) as loader,
        pytest.raises(TrainerConfigError, match=r"shares='auto'.*refuses: set_shares with batch_tokens="),
    ):
        make_trainer(world, str(tmp_path), loader, Line(), loss=loss, shares="auto")
