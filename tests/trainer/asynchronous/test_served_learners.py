"""Learners that exchange over a parameter server: exact where they are synchronous, and no batch is lost or doubled."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from served_runs import Net, make_batches, recipe_of, squares
from server_cluster import few_buckets

from penstock.trainer import DistributedTrainer, TrainerConfig, World, open_world, seed_all
from penstock.trainer.asynchronous.evaluating import Reader
from penstock.trainer.asynchronous.leading import run_learner
from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.setup import build_model, make_schema, prepare_run
from penstock.trainer.asynchronous.worker import WorkerOptions
from penstock.trainer.options import build_config
from penstock.trainer.ranks.world import close_world
from penstock.trainer.recipes.recipe import Recipe
from penstock.trainer.server.client import ClientConfig

ADAMW = {"use": "torch.optim:AdamW", "args": {"lr": 0.02}}
AVERAGE = {"rate": 1.0, "momentum": 0.0}
QUICK = WorkerOptions(pause_s=0.002, silence_s=30.0)


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(64):
        yield


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    """A world of one rank, for learners that are threads of this process."""
    yield open_world(device="cpu")
    close_world()


def learned(
    folder: Path, diloco: Mapping[str, Any], *, trainer: Mapping[str, Any] | None = None, **options: Any
) -> Recipe:
    tables = {
        "parallel": {"mode": "diloco", "diloco": {"over": "server", **diloco}},
        "checkpoint": {"every_steps": 0},
        **(trainer or {}),
    }
    return recipe_of(folder, trainer=tables, **{"optimizer": ADAMW, **options})


def train(recipe: Recipe, world: World, learners: int = 1, shards: int = 2) -> LocalCluster:
    """Train with learners that are threads; returns the cluster that they trained on."""
    cluster = LocalCluster(prepare_run(recipe, learners), shards=shards, silence_s=30.0)
    errors: list[BaseException] = []

    def live(name: str) -> None:
        try:
            run_learner(recipe, name, cluster, world, QUICK)
        except BaseException as exc:  # raised below
            errors.append(exc)
            cluster.ask(lambda one, now: one.stop())

    threads = [threading.Thread(target=live, args=(f"worker-{index:03d}",)) for index in range(learners)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(timeout=60.0)
    assert not any(one.is_alive() for one in threads)
    if errors:
        raise errors[0]
    return cluster


def read_model(recipe: Recipe, cluster: LocalCluster) -> dict[str, torch.Tensor]:
    model = build_model(recipe)
    Reader(cluster, cluster.begin("reader of a test"), make_schema(model), ClientConfig()).load(model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def train_plainly(folder: Path, batches: int, world: World, **options: Any) -> dict[str, torch.Tensor]:
    seed_all(0)
    values = {
        "epochs": 1,
        "output_dir": str(folder),
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True},
        "checkpoint": {"every_steps": 0},
        **options,
    }
    config = build_config(TrainerConfig, values)
    with DistributedTrainer(
        Net(), partial(torch.optim.AdamW, lr=0.02), make_batches(batches), config, loss=squares, world=world
    ) as trainer:
        trainer.train()
        return {name: one.detach().clone() for name, one in trainer.parallel.inner.named_parameters()}


@pytest.mark.parametrize("every", [1, 4, 5])
def test_one_learner_that_averages_is_plain_training_bit_for_bit(tmp_path: Path, world: World, every: int) -> None:
    options: dict[str, Any] = {
        "epochs": 2,
        "schedule": {"shape": "cosine", "warmup_steps": 3},
        "step": {"clip_norm": 0.5},
    }
    recipe = learned(tmp_path, {"every": every, **AVERAGE}, trainer=options)
    cluster = train(recipe, world)
    expected = train_plainly(tmp_path / "plain", 12, world, **options)
    found = read_model(recipe, cluster)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert cluster.coordinator.consumed == 24
