"""Loaders that know what samples cost, through the public face: balanced, bucketed, batched by tokens, warmed up."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from costed_docs import LENGTHS, SAMPLES, make_loader, write_docs, write_index

from penstock import Bucket, TokenBudget, audit
from penstock.loader import (
    ConfigError,
    DatasetError,
    PartitionError,
    StateMismatchError,
)


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_docs(tmp_path_factory.mktemp("docs"))


def batches_of(docs: str, world_size: int, state: Any = None, **options: Any) -> list[list[list[int]]]:
    """The ids of every batch of a pass, rank by rank."""
    found = []
    for rank in range(world_size):
        with make_loader(docs, rank, world_size, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            found.append([batch["__id__"].tolist() for batch in loader])
    return found


def joined(ranks: list[list[list[int]]]) -> list[list[int]]:
    """Global batches, in the order of ranks."""
    assert len(set(map(len, ranks))) == 1, "ranks had different numbers of batches"
    return [[sample for part in parts for sample in part] for parts in zip(*ranks, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_by_cost_share_the_same_global_batches_to_within_one_sample(docs, world_size):
    size = 12 * world_size
    plain = joined(batches_of(docs, world_size, global_batch_size=size))
    ranks = batches_of(docs, world_size, global_batch_size=size, cost="tokens")
    assert joined(ranks) == plain
    for parts in list(zip(*ranks, strict=True))[:-1]:
        costs = [LENGTHS[part].sum() for part in parts]
        assert max(costs) - min(costs) <= max(LENGTHS[part].max() for part in parts)
        assert all(parts)
    assert len({len(part) for part in ranks[0]}) > 3


@pytest.mark.slow
def test_shares_by_cost_heed_the_weights_of_ranks(docs):
    totals = []
    for rank in range(2):
        with make_loader(docs, rank, 2, batch_size=100, cost="tokens") as loader:
            iterator = iter(loader)
            next(iterator)
            loader.set_shares([3.0, 1.0])
            totals.append(LENGTHS[next(iterator)["__id__"].numpy()].sum())
    assert abs(totals[0] / sum(totals) - 0.75) * sum(totals) <= LENGTHS.max()


@pytest.mark.slow
@pytest.mark.parametrize("order", [{}, {"piece": 0, "lanes": 4, "window": 2}, {"shuffle": False}])
def test_buckets_pad_less_come_exactly_once_and_resume_on_another_number_of_ranks(docs, order):
    def padded(batches: list[list[int]]) -> int:
        return sum(len(batch) * LENGTHS[batch].max() for batch in batches)

    options = {"global_batch_size": 24, "bucket": Bucket(run=48), **order}
    whole = joined(batches_of(docs, 1, **options))
    assert sorted(sample for batch in whole for sample in batch) == list(range(SAMPLES))
    assert padded(whole) < 0.65 * padded(joined(batches_of(docs, 1, **{**options, "bucket": None})))
    with make_loader(docs, **options) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        state = json.loads(json.dumps(loader.state_dict()))
    assert state["version"] == 6
    assert state["bucket"]["index"] == "tokens"
    options["bucket"] = "tokens"  # a state brings its own run and pool
    assert list(map(set, joined(batches_of(docs, 3, state, **options)))) == list(map(set, whole[5:]))
    finer = joined(batches_of(docs, 2, state, **{**options, "global_batch_size": 12}))
    assert set(finer[0] + finer[1]) == set(whole[5])


def test_a_state_with_buckets_belongs_to_a_loader_with_the_same_ones(docs):
    with make_loader(docs, batch_size=8, bucket=Bucket(run=64, pool=512)) as loader:
        state = loader.state_dict()
    with make_loader(docs, batch_size=8) as plain:
        with pytest.raises(StateMismatchError, match=r"bucket=: \{'index'.* in the state, none here"):
            plain.load_state_dict(state)
        unbucketed = plain.state_dict()
    with make_loader(docs, batch_size=8, bucket=Bucket(run=32)) as other:
        with pytest.raises(StateMismatchError, match=r"bucket=: .* in the state"):
            other.load_state_dict(state)
        with pytest.raises(StateMismatchError, match="bucket=: none in the state"):
            other.load_state_dict(unbucketed)


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [Bucket(run=4, pool=1000), Bucket(pool=300), Bucket(run=50)])
def test_buckets_told_in_samples_resume_where_the_lanes_that_are_chosen_differ(docs, bucket):
    options = {"bucket": bucket, "lanes": "auto"}
    with make_loader(docs, batch_size=6, **options) as loader:
        iterator = iter(loader)
        taken = [sample for _ in range(9) for sample in next(iterator)["__id__"].tolist()]
        state = loader.state_dict()
    left = joined(batches_of(docs, 5, state, batch_size=2, **options))
    with make_loader(docs, 0, 5, batch_size=2, **options) as loader:
        assert loader.order.lanes != state["lanes"]
    assert sorted(taken + [sample for batch in left for sample in batch]) == list(range(SAMPLES))


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [None, "tokens"])
def test_batches_by_tokens_keep_within_the_budget_resume_and_are_counted_exactly(docs, bucket):
    options = {"batch_tokens": 6000, "bucket": bucket}
    for world_size in (1, 3):
        ranks = batches_of(docs, world_size, **options)
        assert sorted(sample for batch in joined(ranks) for sample in batch) == list(range(SAMPLES))
        assert all(len(part) * LENGTHS[part].max() <= 6000 for parts in ranks for part in parts if part)
        assert all(len(set(map(len, parts))) == 1 for parts in list(zip(*ranks, strict=True))[:-1])
    with make_loader(docs, 1, 3, **options) as loader:
        assert len(loader) == loader.steps_left == len(ranks[1])
        iterator = iter(loader)
        taken = [next(iterator)["__id__"].tolist() for _ in range(4)]
        assert taken == ranks[1][:4]
        assert loader.steps_left == len(loader) - 4
        assert batches_of(docs, 3, loader.state_dict(), **options)[1] == ranks[1][4:]
        assert loader.peek()["__id__"].tolist() == ranks[1][0]
        loader.skip_batches(3)
        assert [batch["__id__"].tolist() for batch in loader] == ranks[1][7:]
        for _ in range(2):
            expected = len(loader)  # each epoch has a number of its own
            assert len(list(loader)) == expected


@pytest.mark.slow
def test_a_whole_budget_makes_the_same_batches_on_every_number_of_ranks(docs):
    options = {"batch_tokens": TokenBudget(tokens=12_000, whole=True)}
    whole = joined(batches_of(docs, 1, **options))
    assert list(map(set, joined(batches_of(docs, 3, **options)))) == list(map(set, whole))
    unpadded = batches_of(docs, 2, batch_tokens=TokenBudget(tokens=6000, padded=False), cost="tokens")
    for parts in zip(*unpadded, strict=True):
        costs = [int(LENGTHS[part].sum()) for part in parts]
        assert sum(costs) <= 12_000
        assert max(costs) - min(costs) <= max(LENGTHS[part].max() for part in parts if part)


@pytest.mark.slow
def test_the_batch_size_changes_at_a_step_boundary_and_the_audit_knows(docs, tmp_path):
    options = {"audit_dir": tmp_path, "last_batch": "drop", "columns": ["n"]}
    seen: list[list[int]] = []
    loaders = [make_loader(docs, rank, 2, batch_size=4, **options) for rank in range(2)]
    iterators = [iter(loader) for loader in loaders]
    for step in range(20):
        if step in (5, 12):
            for loader in loaders:
                loader.set_batch_size(4 * step)
        seen.append([sample for iterator in iterators for sample in next(iterator)["__id__"].tolist()])
        if step == 8:
            states = [loader.state_dict() for loader in loaders]
    assert list(map(len, seen)) == [8] * 5 + [40] * 7 + [96] * 8
    assert [loader.batch_size for loader in loaders] == [48, 48]
    assert states[0] == states[1]
    rest = [len(list(iterator)) for iterator in iterators]
    assert rest == [(SAMPLES - sum(map(len, seen))) // 96] * 2
    assert [len(list(loader)) for loader in loaders] == [SAMPLES // 96] * 2  # an epoch later
    for loader in loaders:
        loader.close()
    whole = joined(batches_of(docs, 1, global_batch_size=1))
    assert sorted(seen[0]) == sorted(sample for batch in whole[:8] for sample in batch)
    report = audit(tmp_path)
    assert report.is_exact
    assert report.batch_sizes == [(0, 40, 40), (0, 320, 96)]
    with make_loader(docs, 0, 2, batch_size=4) as resumed:  # a state knows no batch size
        resumed.load_state_dict(states[0])
        resumed.set_batch_size(20)
        assert resumed.steps_left == -(-(SAMPLES - 5 * 8 - 4 * 40) // 40)
        assert next(iter(resumed))["__id__"].tolist() == [s for s in seen[9] if s in seen[9][:20]]


def test_the_audit_finds_a_tail_that_a_smaller_batch_size_should_have_delivered(docs, tmp_path):
    with make_loader(docs, batch_size=200, audit_dir=tmp_path, last_batch="drop") as loader:
        iterator = iter(loader)
        for _ in range(4):
            next(iterator)
        loader.set_batch_size(50)
        state = {**loader.state_dict(), "epoch": 1, "consumed": 0}  # 300 samples are left out
        del state["checksum"]
        loader.load_state_dict(state)
        next(iter(loader))
    assert audit(tmp_path).epochs[0].missing == 300


def test_the_audit_knows_the_tail_that_a_budget_drops(docs, tmp_path):
    with make_loader(docs, batch_tokens=9000, bucket="tokens", audit_dir=tmp_path, last_batch="drop") as loader:
        for _ in range(2):
            for _ in loader:
                pass
        next(iter(loader))
    report = audit(tmp_path)
    assert report.is_exact
    assert all(account.reached < SAMPLES for account in report.epochs[:2])


def test_the_audit_knows_the_tail_of_a_budget_where_the_loop_leaves_after_the_last_batch(tmp_path):
    folder, logs = tmp_path / "docs", tmp_path / "logs"
    folder.mkdir()
    lengths = np.array([1000] * 40 + [10] * 20)  # the last ones are more than a batch has, and fill none
    pq.write_table(pa.table({"tokens": lengths, "n": np.arange(60)}), folder / "0.parquet")
    write_index(folder, "tokens")
    options = {"batch_tokens": TokenBudget(tokens=2000, padded=False), "shuffle": False, "last_batch": "drop"}
    with make_loader(str(folder), audit_dir=logs, **options) as loader:
        passing = iter(loader)
        for _ in range(loader.steps_left):
            next(passing)
        state = loader.state_dict()
    with make_loader(str(folder), audit_dir=logs, **options) as loader:
        loader.load_state_dict(state)
        list(loader)
    report = audit(logs)
    assert [(epoch.reached, epoch.missing) for epoch in report.epochs] == [(40, 0), (40, 0)]


def test_an_epoch_whose_rest_is_below_the_new_batch_size_is_over(docs):
    with make_loader(docs, batch_size=100, last_batch="drop") as loader:
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        loader.set_batch_size(300)
        assert list(iterator) == []
        assert loader.epoch == 1
        assert len(list(loader)) == len(loader) == 3
        with pytest.raises(PartitionError, match="above the data set's"):
            loader.set_batch_size(SAMPLES + 1)
        assert loader.batch_size == 300


@pytest.mark.parametrize("way", ["set", "load"])
def test_the_audit_knows_the_rest_of_an_epoch_that_is_below_a_new_batch_size(docs, tmp_path, way):
    options = {"audit_dir": tmp_path, "last_batch": "drop"}
    with make_loader(docs, batch_size=100, **options) as loader:
        iterator = iter(loader)
        for _ in range(10):
            next(iterator)
        if way == "set":
            loader.set_batch_size(300)
        state = loader.state_dict()
    with make_loader(docs, batch_size=300, **options) as loader:
        loader.load_state_dict(state)
        list(loader)
    report = audit(tmp_path)
    assert [(epoch.reached, epoch.missing) for epoch in report.epochs] == [(1000, 0), (900, 0)]


def test_the_audit_knows_the_rest_of_an_epoch_that_was_skipped_to_its_end(docs, tmp_path):
    state = None
    for skipped in (0, 2, 0):  # the second start delivers nothing
        with make_loader(docs, batch_size=300, last_batch="drop", audit_dir=tmp_path) as loader:
            if state is not None:
                loader.load_state_dict(state)
            loader.skip_batches(skipped)
            if not skipped:
                next(iter(loader))
            state = loader.state_dict()
    report = audit(tmp_path)
    assert [(epoch.reached, epoch.skipped, epoch.missing) for epoch in report.epochs] == [(900, 600, 0), (300, 0, 0)]


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        (
            {"batch_size": 4, "cost": "words"},
            DatasetError,
            r"no index of the costs 'words'.*penstock index .*--cost words",
        ),
        ({"batch_size": 4, "bucket": "words"}, DatasetError, "no index of the costs 'words'"),
        ({"batch_tokens": TokenBudget(tokens=9, index="words")}, DatasetError, "no index of the costs 'words'"),
        ({"batch_size": 4, "cost": "quadratic"}, ConfigError, "hidden_size=4096"),
        ({"batch_size": 4, "cost": 3}, ConfigError, "cost=3"),
        ({"batch_size": 4, "bucket": 3}, ConfigError, "bucket=3"),
        ({"batch_size": 4, "cost": "tokens", "last_batch": "pad"}, ConfigError, "cost= with last_batch='pad'"),
        ({"batch_tokens": 6000, "last_batch": "pad"}, ConfigError, "batch_tokens= with last_batch='pad'"),
        ({"batch_tokens": 6000, "batch_size": 4}, ConfigError, "give one of them"),
        ({"batch_tokens": 1999}, PartitionError, r"batch_tokens=1999: sample \d+ has 2,000 tokens"),
        ({"batch_tokens": 6000, "max_bad_chunks": 1}, ConfigError, "max_bad_chunks=1 with batch_tokens="),
        ({"batch_tokens": 6000, "on_error": "replace"}, ConfigError, "on_error='replace' with batch_tokens="),
        ({"batch_tokens": True}, ConfigError, "batch_tokens=True"),
        (
            {"batch_tokens": 6000, "cost": "tokens"},
            ConfigError,
            r"go beyond the budget; give TokenBudget\(padded=False\)",
        ),
        ({"batch_tokens": 10**7, "last_batch": "drop"}, PartitionError, "all 1,100 samples are less"),
    ],
)
def test_what_cannot_work_is_refused_by_name(docs, options, error, problem):
    with pytest.raises(error, match=problem):
        make_loader(docs, **options)


def test_batch_sizes_and_shares_are_refused_where_tokens_bound_the_rows_of_ranks(docs):
    with make_loader(docs, 0, 2, batch_tokens=6000) as loader:
        with pytest.raises(ConfigError, match="batch_tokens="):
            loader.set_batch_size(4)
        with pytest.raises(ConfigError, match="more rows than its budget holds"):
            loader.set_shares([1, 2])
    with make_loader(docs, 0, 2, batch_tokens=TokenBudget(tokens=6000, padded=False)) as loader:
        loader.set_shares([1, 2])


def test_a_log_with_an_impossible_change_of_the_batch_size_is_damaged(docs, tmp_path):
    with make_loader(docs, batch_size=4, audit_dir=tmp_path) as loader:
        next(iter(loader))
        loader.set_batch_size(8)
    (path,) = tmp_path.glob("*.deliveries")
    good = path.read_bytes()
    assert audit(tmp_path).batch_sizes == [(0, 4, 8)]
    for at, word in ((-8, 0), (-8, -3), (-16, 0), (-40, -1)):  # the size twice, how many words follow, the epoch
        bad = bytearray(good)
        bad[len(good) + at : len(good) + at + 8] = word.to_bytes(8, "little", signed=True)
        path.write_bytes(bad)
        with pytest.raises(DatasetError, match="damaged at byte"):
            audit(tmp_path)


def test_a_loader_by_tokens_says_that_it_is_one(docs):
    with make_loader(docs, batch_tokens=6000) as loader, make_loader(docs, batch_size=4) as plain:
        assert loader.is_batched_by_tokens
        assert not plain.is_batched_by_tokens
