"""Buckets on shards: balanced by weight, and few move when shards come and go."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from served_runs import recipe_of

from penstock.trainer.asynchronous.local_cluster import LocalCluster
from penstock.trainer.asynchronous.setup import prepare_run
from penstock.trainer.errors import TrainerConfigError
from penstock.trainer.server.placement import (
    BUCKETS,
    Placement,
    bucket_of_piece,
    buckets_of_rows,
    moves,
    stable_hash,
)

NAMES = st.lists(st.integers(0, 10**6).map("shard-{}".format), min_size=2, max_size=9, unique=True)


@settings(max_examples=100, deadline=None)
@given(NAMES)
def test_a_shard_more_moves_few_buckets_and_all_of_them_to_it(names: list[str]) -> None:
    *old, new = names
    before, after = Placement(dict.fromkeys(old, 1.0)), Placement(dict.fromkeys(names, 1.0))
    moved = moves(before, after)
    assert {move.target for move in moved} == {new}
    assert len(moved) <= 1.2 / len(names) * BUCKETS
    back = moves(after, before)
    assert {(move.bucket, move.source, move.target) for move in back} == {
        (move.bucket, move.target, move.source) for move in moved
    }


@pytest.mark.slow
def test_shards_that_join_a_cluster_hold_what_they_are_to_and_little_moves(tmp_path: Path) -> None:
    setup = prepare_run(recipe_of(tmp_path, model="TableNet"), 1)  # rows of a table lie in all buckets
    cluster = LocalCluster(setup, shards=1, silence_s=30)
    for count in (2, 3):
        moved = cluster.place({f"shard-{index}": 1.0 for index in range(count)})
        assert 0.8 / count * BUCKETS < moved <= 1.2 / count * BUCKETS
    held = [frozenset(shard.buckets) for shard in cluster.shards.values()]
    assert held == [cluster.placement().buckets_of(name) for name in cluster.shards]
    assert cluster.place({"shard-1": 1.0}) == BUCKETS - len(held[1])
    assert list(cluster.shards) == ["shard-1"]


def test_with_many_shards_the_share_that_moves_is_fair_within_chance() -> None:
    for count in (15, 31, 63):
        names = [f"shard-{index}" for index in range(count + 1)]
        moved = len(moves(Placement(dict.fromkeys(names[:-1], 1.0)), Placement(dict.fromkeys(names, 1.0))))
        fair = BUCKETS / (count + 1)
        assert abs(moved - fair) < 4 * fair**0.5


@settings(max_examples=50, deadline=None)
@given(NAMES, st.data())
def test_every_bucket_lies_on_one_shard_and_its_copies_on_others(names: list[str], data: st.DataObject) -> None:
    placement = Placement({name: data.draw(st.floats(0.1, 10)) for name in names})
    assert sum(len(placement.buckets_of(name)) for name in names) == BUCKETS
    for bucket in (0, 17, BUCKETS - 1):
        holders = placement.holders(bucket, 3)
        assert holders[0] == placement.shard_of(bucket)
        assert len(set(holders)) == min(3, len(names))
        # Without its shard a bucket lies where its first copy is, so that nothing has to be copied.
        rest = {name: weight for name, weight in placement.weights.items() if name != holders[0]}
        assert Placement(rest).shard_of(bucket) == holders[1]


def test_a_shard_of_twice_the_weight_holds_twice_as_many() -> None:
    placement = Placement({"a": 1.0, "b": 2.0, "c": 1.0})
    shares = [len(placement.buckets_of(name)) / BUCKETS for name in "abc"]
    assert shares == pytest.approx([0.25, 0.5, 0.25], abs=0.03)


def test_placement_is_the_same_for_ever() -> None:
    placement = Placement({"shard-0": 1.0, "shard-1": 1.0, "shard-2": 3.0})
    assert stable_hash("penstock") == GOLDEN["hash"]
    assert [bucket_of_piece("w", index) for index in range(4)] == GOLDEN["pieces"]
    assert buckets_of_rows("t", np.array([0, 1, -1, 2**62])).tolist() == GOLDEN["rows"]
    assert "".join(placement.shard_of(bucket)[-1] for bucket in range(40)) == GOLDEN["shards"]


def test_rows_fill_the_buckets_evenly() -> None:
    counts = np.bincount(buckets_of_rows("t", np.arange(BUCKETS * 50)), minlength=BUCKETS)
    assert counts.min() > 15
    assert counts.max() < 100


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": -1.0}, {"a": float("nan")}, {"a": float("inf")}])
def test_impossible_weights_are_refused(weights: dict[str, float]) -> None:
    with pytest.raises(TrainerConfigError, match="shard"):
        Placement(weights)


GOLDEN: dict[str, object] = {
    "hash": 18111801501147755303,
    "pieces": [1648, 2501, 3620, 1213],
    "rows": [1784, 852, 613, 721],
    "shards": "2210221002002020222011012212222122202001",
}
