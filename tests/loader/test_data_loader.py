"""The loader as its users see it: exact epochs, exact resumes, batches of the right kind, nothing left behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from loaders_of_ranks import SIZES, ids_of, ranks
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Subset
from penstock.loader import (
    StateMismatchError,
)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def test_an_epoch_is_every_sample_once_and_its_fields_belong_together(tars):
    with DistributedDataLoader(tars, batch_size=16, last_batch="partial", with_ids=True) as loader:
        seen = {}
        for batch in loader:
            for sample_id, text, key, data in zip(
                ids_of(batch), batch["txt"], batch["__key__"], batch["bin"], strict=True
            ):
                assert int(text) == int(key) == sample_id
                assert data == np.random.default_rng(sample_id).bytes(40)
                seen[sample_id] = seen.get(sample_id, 0) + 1
        assert seen == dict.fromkeys(range(sum(SIZES)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("last_batch", ["drop", "pad", "partial"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_rank_gets_the_same_number_of_batches(tars, last_batch, world_size):
    loaders = ranks(tars, world_size, batch_size=11, last_batch=last_batch, with_ids=True)
    counts = [sum(1 for _ in loader) for loader in loaders]
    assert counts == [len(loaders[0])] * world_size
    for loader in loaders:
        loader.close()


def test_padding_marks_what_it_repeats(tars):
    delivered = []
    for loader in ranks(tars, 5, batch_size=32, last_batch="pad", with_ids=True):
        for batch in loader:
            assert len(batch["__id__"]) == len(batch["__valid__"]) == len(batch["txt"]) == 32
            delivered += batch["__id__"][batch["__valid__"]].tolist()
        loader.close()
    assert sorted(delivered) == list(range(sum(SIZES)))


@pytest.mark.slow
def test_a_rank_without_a_sample_of_the_last_batch_still_gets_a_padded_one(tmp_path):
    write_tars(tmp_path, [9])
    batches = [list(loader) for loader in ranks(str(tmp_path), 4, batch_size=2, last_batch="pad", with_ids=True)]
    assert [len(of_rank) for of_rank in batches] == [2, 2, 2, 2]
    assert [of_rank[1]["__valid__"].sum().item() for of_rank in batches] == [1, 0, 0, 0]


def test_the_next_pass_is_the_next_epoch_in_another_order(tars):
    with DistributedDataLoader(tars, batch_size=50, with_ids=True) as loader:
        first = [sample for batch in loader for sample in ids_of(batch)]
        assert loader.epoch == 1
        second = [sample for batch in loader for sample in ids_of(batch)]
        assert first != second
        loader.set_epoch(0)
        assert [sample for batch in loader for sample in ids_of(batch)] == first


def test_an_order_depends_on_the_seed_alone(tars):
    def order(seed: int, **options: Any) -> list[int]:
        with DistributedDataLoader(tars, batch_size=16, seed=seed, with_ids=True, **options) as loader:
            return [sample for batch in loader for sample in ids_of(batch)]

    assert order(3) == order(3, threads=3, memory_limit="1GiB")
    assert order(3) != order(4)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("before", "after", "stop_after"),
    [(1, 4, 1), (1, 4, 7), (3, 2, 7), (2, 2, 0), (4, 1, 100)],
)
def test_resume_on_another_number_of_ranks_repeats_and_skips_nothing(tars, before, after, stop_after):
    delivered, state = [], None
    for loader in ranks(tars, before, batch_size=5, last_batch="partial", with_ids=True):
        for step, batch in enumerate(loader):
            if step == stop_after:
                break
            delivered += ids_of(batch)
            taken = loader.state_dict()
        if stop_after == 0:
            continue
        assert state in (None, taken)
        state = json.loads(json.dumps(taken))
        loader.close()
    for loader in ranks(tars, after, batch_size=8, last_batch="partial", with_ids=True, threads=2):
        if state is not None:
            loader.load_state_dict(state)
        if state is None or state["epoch"] == 0:
            delivered += [sample for batch in loader for sample in ids_of(batch)]
        loader.close()
    assert sorted(delivered) == list(range(sum(SIZES)))


def test_a_state_from_an_epochs_end_continues_with_the_next_epoch(tars):
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as loader:
        for _ in loader:
            at_last_batch = loader.state_dict()
        after = loader.state_dict()
        expected = ids_of(next(iter(loader)))
    assert at_last_batch == after
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as resumed:
        resumed.load_state_dict(at_last_batch)
        assert resumed.epoch == 1
        assert ids_of(next(iter(resumed))) == expected


def test_steps_left_are_counted_from_the_last_batch(tars):
    with DistributedDataLoader(tars, batch_size=16, last_batch="partial", with_ids=True) as loader:
        batches = iter(loader)
        seen = [sample for _ in range(4) for sample in ids_of(next(batches))]
        assert loader.steps_left == len(loader) - 4
        seen += [sample for batch in batches for sample in ids_of(batch)]
        assert sorted(seen) == list(range(sum(SIZES)))


def test_leaving_after_the_last_batch_makes_the_next_pass_the_next_epoch(tars):
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as loader:
        for step, _ in enumerate(loader):
            if step == len(loader) - 1:
                break
        assert sum(1 for _ in loader) == len(loader)
        assert loader.epoch == 2


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"seed": 5}, "seed: 0 in the state, 5 here"),
        ({"shuffle": False}, "shuffle: True in the state, False here"),
        ({"lanes": 64}, "lanes: 16 in the state, 64 here"),
        ({"window": 7}, "window"),
    ],
)
def test_a_state_of_another_order_is_refused_by_name(tars, changed, named):
    with DistributedDataLoader(tars, batch_size=16) as loader:
        state = loader.state_dict()
    with DistributedDataLoader(tars, batch_size=16, **changed) as other, pytest.raises(StateMismatchError, match=named):
        other.load_state_dict(state)


def test_a_state_of_another_data_set_is_refused(tars, tmp_path):
    write_tars(tmp_path, [50, 50])
    with DistributedDataLoader(tars, batch_size=16) as loader:
        state = loader.state_dict()
    with DistributedDataLoader(str(tmp_path), batch_size=16) as other:
        with pytest.raises(StateMismatchError, match="data set"):
            other.load_state_dict(state)
        with pytest.raises(StateMismatchError, match="version"):
            other.load_state_dict({"epoch": 1})


def test_auto_lanes_and_window_are_taken_over_from_a_state(tars):
    with DistributedDataLoader(tars, batch_size=4, world_size=32, rank=0) as large:
        state = large.state_dict()
    with DistributedDataLoader(tars, batch_size=4) as small:
        assert small.order.lanes == 16
        small.load_state_dict(state)
        assert small.order == large.order


@pytest.mark.slow
def test_a_world_larger_than_the_data_set_works_when_batches_may_be_padded(tmp_path):
    write_tars(tmp_path, [3])
    loaders = ranks(str(tmp_path), 8, batch_size=1, last_batch="pad", with_ids=True)
    valid = [next(iter(loader))["__valid__"].item() for loader in loaders]
    assert valid == [True] * 3 + [False] * 5


@pytest.mark.slow
def test_metrics_count_what_was_done_and_where_the_time_went(tars):
    with DistributedDataLoader(tars, batch_size=16, last_batch="partial") as loader:
        for _ in loader:
            time.sleep(0.02)
        metrics = loader.metrics()
        assert metrics.samples == sum(SIZES)
        assert metrics.batches == len(loader)
        assert metrics.fetched_bytes > 0
        assert metrics.consumer_busy_s >= 0.02 * (len(loader) - 1)
        assert metrics.peak_bytes > 0
        json.dumps(metrics.to_dict())


@pytest.mark.slow
def test_set_shares_changes_who_gets_a_sample_and_no_global_batch(tars):
    equal = [[ids_of(batch) for batch in loader] for loader in ranks(tars, 2, batch_size=16, with_ids=True)]
    uneven = []
    for loader in ranks(tars, 2, batch_size=16, with_ids=True):
        batches = iter(loader)
        taken = [ids_of(next(batches))]
        loader.set_shares([3, 1])
        uneven.append(taken + [ids_of(batch) for batch in batches])
        loader.close()
    for step, (first, second, one, two) in enumerate(zip(*equal, *uneven, strict=True)):
        assert sorted(first + second) == sorted(one + two)
        assert (len(one), len(two)) == ((16, 16) if step == 0 else (24, 8))


def test_padded_batches_have_one_shape_with_uneven_shares_too(tars):
    shapes, delivered = [], []
    for loader in ranks(tars, 5, batch_size=3, shuffle=False, last_batch="pad", subset=Subset.take(14), with_ids=True):
        loader.set_shares([1, 1.5, 1, 1.5, 1])
        [batch] = loader
        shapes.append(len(batch["__id__"]))
        delivered += batch["__id__"][batch["__valid__"]].tolist()
        loader.close()
    assert shapes == [2, 4, 3, 3, 3]  # a part of 14 would be 4 where that of a full batch is 3
    assert len(delivered) == len(set(delivered)) == 14


def test_the_environment_of_torchrun_gives_rank_and_world_size(tars, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with DistributedDataLoader(tars, batch_size=16, with_ids=True) as loader:
        assert "rank=1, world_size=2" in repr(loader)


def test_a_path_object_and_a_single_shard_are_sources_too(tars):
    with DistributedDataLoader(Path(tars) / "shard-00002.tar", batch_size=16, last_batch="partial") as loader:
        assert sum(len(batch["txt"]) for batch in loader) == SIZES[2]
