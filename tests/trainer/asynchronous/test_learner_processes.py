"""Learners over servers as processes: their ranks, their deaths, and the same bits as learners over all-reduce."""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from safetensors.torch import load_file
from served_runs import train_learners, train_rows
from test_served_learners import AVERAGE, counts_of, learned, read_model, tally

from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.local_run import train_locally
from penstock.trainer.asynchronous.setup import prepare_run
from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.on_ray import worker_actor

pytestmark = pytest.mark.slow

PATIENCE_S = 300.0
"""On a busy machine a process may be silent for long; one that is given up trains on its batches again."""


@pytest.fixture(autouse=True)
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """The clusters that a test has made."""
    made: list[LocalCluster] = []
    begin = LocalCluster.__init__

    def keep(self: LocalCluster, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(LocalCluster, "__init__", keep)
    return made


def test_synchronous_learners_have_the_bits_of_learners_over_all_reduce(
    tmp_path: Path, clusters: list[LocalCluster]
) -> None:
    recipe = learned(
        tmp_path,
        {"every": 3},
        model="NoisyNet",
        trainer={"schedule": {"shape": "cosine", "warmup_steps": 2}},
        silence_s=PATIENCE_S,
    )
    summary = train_locally(recipe, workers=2, shards=2)
    expected = run_ranks(train_learners, 2, str(tmp_path / "ranks"), 12, 3)
    found = read_model(recipe, clusters[0])
    assert all(torch.equal(found[name], one) for name, one in expected[0].items())
    assert summary.steps == 6


@pytest.mark.parametrize("zero", [0, pytest.param(1, marks=pytest.mark.full), pytest.param(3, marks=pytest.mark.full)])
def test_a_learner_of_two_ranks_is_plain_training_on_them_bit_for_bit(
    tmp_path: Path, clusters: list[LocalCluster], zero: int
) -> None:
    recipe = learned(
        tmp_path,
        {"every": 4, "ranks": 2, **AVERAGE},
        model="NoisyNet",
        data={"use": "served_runs:make_rows", "args": {"count": 60, "global_batch_size": 6}},
        trainer={"epochs": 2, "step": {"clip_norm": 0.5}},
        parallel={"zero": zero},
        silence_s=PATIENCE_S,
    )
    train_locally(recipe, workers=1, shards=2)
    expected = run_ranks(train_rows, 2, str(tmp_path / "ranks"), 60, 6, zero)
    found = read_model(recipe, clusters[0])
    assert all(torch.equal(found[name], one) for name, one in expected[0].items())


def test_a_learner_that_is_killed_begins_anew_and_each_batch_counts_once(
    tmp_path: Path, clusters: list[LocalCluster]
) -> None:
    recipe = tally(tmp_path, {"every": 3}, loss="slow_counting:count_apart_slowly", policy="asp")
    run = threading.Thread(target=train_locally, args=(recipe,), kwargs={"workers": 2, "shards": 2})
    run.start()
    killed = 0
    for name, consumed in (("worker-001, rank 0", 6), ("worker-000, rank 0", 18)):
        while run.is_alive() and not (clusters and clusters[0].coordinator.consumed >= consumed):
            time.sleep(0.01)
        for process in multiprocessing.active_children():
            if process.name == name:
                process.kill()
                killed += 1
    run.join(300)
    assert not run.is_alive()
    assert killed == 2
    assert counts_of(recipe, clusters[0]) == [-1.0] * 20
    notes = [one["note"] for one in records(tmp_path) if one["kind"] == "note"]
    assert sum("died (-9): what worker-00" in one for one in notes) == 2


@pytest.mark.full
def test_a_learner_that_cannot_work_ends_the_run_with_what_it_met(tmp_path: Path) -> None:
    recipe = learned(tmp_path, {"every": 3, "ranks": 2})
    with pytest.raises(TrainerConfigError, match="its data take no rank"):
        train_locally(recipe, workers=1, shards=1)


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_records_tell_of_exchanges_and_evaluations_and_the_last_weights_are_exported(
    tmp_path: Path, clusters: list[LocalCluster]
) -> None:
    trainer = {"epochs": 2, "export": "last.safetensors", "checkpoint": {"every_steps": 3}}
    recipe = learned(tmp_path, {"every": 3}, evaluates=True, trainer=trainer)
    summary = train_locally(recipe, workers=2, shards=1)
    by_kind: dict[str, list[dict[str, Any]]] = {}
    for one in records(tmp_path):
        by_kind.setdefault(one["kind"], []).append(one)
    assert by_kind["start"][0]["mode"] == "diloco"
    assert [one["loss"] for one in by_kind["evaluate"]][-1] == summary.metrics["loss"]
    last = by_kind["train"][-1]
    assert {"outer_norm", "outer_bytes", "outer_wait_s", "staleness", "loss"} <= last.keys()
    values = sum(one.numel() for one in read_model(recipe, clusters[0]).values())
    assert last["outer_bytes"] >= 8 * 2 * 4 * values  # four exchanges of each learner push and pull all
    exported = load_file(tmp_path / "last.safetensors")
    assert all(torch.equal(exported[name], one) for name, one in read_model(recipe, clusters[0]).items())
    assert sorted(one.name for one in (tmp_path / "learners").iterdir()) == [
        "worker-000-0-of-1.safetensors",
        "worker-001-0-of-1.safetensors",
    ]


@pytest.mark.full
def test_the_actor_of_a_worker_starts_a_learner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    trainer = {"checkpoint": {"every_steps": 3}}
    recipe = learned(tmp_path, {"every": 3}, trainer=trainer, silence_s=PATIENCE_S)
    for number in range(2):
        cluster = LocalCluster(prepare_run(recipe, 1, run="the run"), shards=2, silence_s=PATIENCE_S)
        monkeypatch.setattr(worker_actor, "RayServices", lambda token, cluster=cluster: cluster)
        settings = worker_actor.WorkerSettings(
            name="worker-000", recipe=recipe.describe(), folder=str(Path.cwd()), token="", silence_s=PATIENCE_S
        )
        assert worker_actor.TrainingWorker(settings).run() is None
        assert cluster.coordinator.is_done
        note = "worker-000: worker-000 goes on with the inner optimizer of its last exchange"
        assert (note in capfd.readouterr().err) == (number == 1)
