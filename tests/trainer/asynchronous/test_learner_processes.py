"""Learners over servers as processes: their ranks, their deaths, and the same bits as learners over all-reduce."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from served_runs import recipe_of, train_learners, train_rows
from test_served_learners import ADAMW, AVERAGE, learned, read_model

from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.local_run import train_locally

pytestmark = pytest.mark.slow


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
        tmp_path, {"every": 3}, model="NoisyNet", trainer={"schedule": {"shape": "cosine", "warmup_steps": 2}}
    )
    summary = train_locally(recipe, workers=2, shards=2)
    expected = run_ranks(train_learners, 2, str(tmp_path / "ranks"), 12, 3)
    found = read_model(recipe, clusters[0])
    assert all(torch.equal(found[name], one) for name, one in expected[0].items())
    assert summary.steps == 6


@pytest.mark.parametrize("zero", [0, 1, 3])
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
    )
    train_locally(recipe, workers=1, shards=2)
    expected = run_ranks(train_rows, 2, str(tmp_path / "ranks"), 60, 6, zero)
    found = read_model(recipe, clusters[0])
    assert all(torch.equal(found[name], one) for name, one in expected[0].items())
