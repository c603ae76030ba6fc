"""A run in one process gets and loses workers and shards while it trains, and every batch counts once."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import served_runs
import torch
from served_runs import recipe_of
from server_cluster import few_buckets

from penstock.cli import run as run_command
from penstock.trainer.asynchronous.evaluating import Reader
from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.local_run import train_locally
from penstock.trainer.asynchronous.setup import build_model, make_schema
from penstock.trainer.recipes.recipe import Recipe
from penstock.trainer.report.status.scaling import choose_names
from penstock.trainer.server.client import ClientConfig

BATCHES = 60


@pytest.fixture(scope="module", autouse=True)
def small() -> Iterator[None]:
    with few_buckets(64):
        yield


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[LocalCluster]:
    """The clusters that a test has made."""
    made: list[LocalCluster] = []
    begin = LocalCluster.__init__

    def keep(self: LocalCluster, *args: Any, **kwargs: Any) -> None:
        begin(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(LocalCluster, "__init__", keep)
    return made


def count_slowly(model: served_runs.Tallies, batch: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    time.sleep(0.01)
    return served_runs.count_in_one(model, batch)


def tally(folder: Path, **server: Any) -> Recipe:
    return recipe_of(
        folder,
        batches=BATCHES,
        model="Tallies",
        model_args={"batches": BATCHES},
        loss="count_slowly",
        optimizer={"use": "torch.optim:SGD", "args": {"lr": 1.0}},
        trainer={"epochs": 3},
        **server,
    )


def counts(recipe: Recipe, cluster: LocalCluster) -> list[float]:
    model = build_model(recipe)
    begun = cluster.begin("reader of a test")
    Reader(cluster, begun, make_schema(model), ClientConfig()).load(model)
    assert isinstance(model, served_runs.Tallies)
    return [one.item() for one in model.counts]


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["asp", "ssp(2)", "bsp"])
def test_every_batch_counts_once_while_a_command_adds_and_drains(
    tmp_path: Path,
    clusters: list[LocalCluster],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    policy: str,
) -> None:
    monkeypatch.setattr(served_runs, "count_slowly", count_slowly, raising=False)
    recipe = tally(tmp_path, policy=policy, lease=4)
    run = threading.Thread(target=train_locally, args=(recipe,), kwargs={"workers": 2, "shards": 1})
    run.start()
    while not clusters or clusters[0].coordinator.consumed < 5:
        time.sleep(0.01)
    held: list[tuple[set[str], list[str]]] = []
    for options in (["--shards=3"], ["--workers=4", "--shards=2"], ["--workers=1"]):
        assert run_command(["scale", str(tmp_path), *options]) == 0
        held.append((set(clusters[0].shards), sorted(clusters[0].coordinator.members)))
    shown = capsys.readouterr().out.splitlines()
    run.join(120)
    assert not run.is_alive()
    assert [one for one, _ in held] == [
        {"shard-0", "shard-1", "shard-2"},
        {"shard-0", "shard-1"},
        {"shard-0", "shard-1"},
    ]
    assert shown == ["2 workers over 3 shards", "4 workers over 2 shards", "1 worker over 2 shards"]
    assert all(shard.buckets for shard in clusters[0].shards.values())
    assert clusters[0].coordinator.is_done
    if policy != "bsp":  # there a step's mean counts each of its batches by its share
        assert counts(recipe, clusters[0]) == [-3.0] * BATCHES


@pytest.mark.parametrize(
    ("held", "count", "added", "removed"),
    [
        (["a-0", "a-1"], 4, ["a-2", "a-3"], []),
        (["a-0", "a-2"], 3, ["a-1"], []),
        (["a-9", "a-10", "a-1"], 2, [], ["a-10"]),
        ([], 1, ["a-0"], []),
        (["a-0"], 1, [], []),
    ],
)
def test_the_lowest_names_come_and_the_highest_go(
    held: list[str], count: int, added: list[str], removed: list[str]
) -> None:
    assert choose_names(held, count, "a-{}") == (added, removed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "give --workers or --shards"),
        (["--workers=0"], "--workers 0 must be 1 or more"),
        (["--shards=2"], "is not the output_dir of a run"),
    ],
)
def test_what_cannot_be_asked_for_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    assert run_command(["scale", str(tmp_path), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_where_nothing_runs_any_more_gives_no_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.cli.scale._PATIENCE_S", 0.2)
    (tmp_path / "ranks").mkdir()
    assert run_command(["scale", str(tmp_path), "--shards=2"]) == 2
    assert "no run in" in capsys.readouterr().err
    assert not list((tmp_path / "ranks").iterdir())
