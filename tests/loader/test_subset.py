"""Loaders of a part of a data set, and loaders that draw by weights, through the public face."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Manifest, Subset, audit, open_manifest
from penstock.loader import BadChunkWarning, ConfigError, DatasetError, StateMismatchError
from penstock.loader.integrations import TorchLoader

SIZES = [30, 50, 20, 100, 7, 40]
SAMPLES = sum(SIZES)
SPLIT = Subset.split({"train": 0.8, "val": 0.2}, seed=3)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("tars")
    write_tars(folder, SIZES)
    return str(folder)


def ids_of(source: str | Manifest, **options: Any) -> list[int]:
    with DistributedDataLoader(source, **{"batch_size": 7, "last_batch": "partial", "with_ids": True, **options}) as it:
        return [sample_id for batch in it for sample_id in batch["__id__"].tolist()]


def test_the_parts_of_a_split_are_disjoint_and_the_data_set_together(tars):
    train, val = (ids_of(tars, subset=part) for part in SPLIT.values())
    assert sorted(train + val) == list(range(SAMPLES))
    assert sorted(ids_of(tars, subset=SPLIT["val"], seed=9, shuffle=False, rank=0, world_size=1)) == sorted(val)
    assert train != sorted(train)


def test_ids_of_a_data_set_are_an_array_of_the_users_own(tars):
    with DistributedDataLoader(tars, batch_size=7) as loader:
        ids = loader.dataset.ids
        assert (ids.dtype, ids.tolist()) == (np.int64, list(range(len(loader.dataset))))
        assert loader.dataset[10:4:-2].ids.tolist() == [10, 8, 6]
        ids[:] = -1
        assert loader.dataset.ids[-1] == len(loader.dataset) - 1


@pytest.mark.slow
def test_lengths_batches_and_samples_by_id_are_those_of_the_subset(tars):
    val = sorted(ids_of(tars, subset=SPLIT["val"]))
    for last_batch, steps in (("drop", len(val) // 7), ("pad", -(-len(val) // 7)), ("partial", -(-len(val) // 7))):
        with DistributedDataLoader(tars, batch_size=7, subset=SPLIT["val"], last_batch=last_batch, with_ids=True) as it:
            first = it.peek()["__id__"].tolist()
            batches = [batch["__id__"].tolist() for batch in it]
            assert len(it) == len(batches) == steps
            assert batches[0] == first
            assert {x for batch in batches for x in batch} <= set(val)
            assert it.metrics().samples == sum(map(len, batches)) - (7 * steps - len(val)) * (last_batch == "pad")
            view = it.dataset
            assert len(view) == len(val)
            assert (view.ids.dtype, view.ids.tolist()) == (np.int64, val)
            assert view[2]["txt"] == str(val[2])
            assert view.find(f"{val[5]:08d}") == 5
            assert [sample["txt"] for sample in view[-2:]] == [str(x) for x in val[-2:]]
            assert view[::-1].ids.tolist() == val[::-1]
            assert view[1:5:2].ids.tolist() == val[1:5:2]
            assert view[::-1].find(f"{val[5]:08d}") == len(val) - 6
            with pytest.raises(IndexError, match=f"of {len(val)}"):
                view[len(val)]


def test_a_torch_loader_of_a_subset_has_its_samples(tars):
    with DistributedDataLoader(tars, batch_size=7, subset=SPLIT["val"]) as loader:
        assert len(TorchLoader(loader).dataset) == len(ids_of(tars, subset=SPLIT["val"]))


@pytest.mark.slow
def test_a_run_on_a_subset_resumes_on_other_ranks_and_its_audit_is_exact(tars, tmp_path):
    def run(world_size: int, state: dict[str, Any] | None, stop: int | None) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for rank in range(world_size):
            with DistributedDataLoader(
                tars,
                global_batch_size=12,
                subset=SPLIT["train"],
                rank=rank,
                world_size=world_size,
                lanes=16,
                last_batch="partial",
                audit_dir=tmp_path,
            ) as loader:
                if state is not None:
                    loader.load_state_dict(state)
                for step, _ in enumerate(loader, start=1):
                    if step == stop:
                        break
                saved = json.loads(json.dumps(loader.state_dict()))
        return saved

    state = run(3, None, 5)
    assert (state["version"], state["consumed"]) == (3, 60)
    run(2, state, None)
    report = audit(tmp_path)
    train = len(ids_of(tars, subset=SPLIT["train"]))
    assert report.is_exact
    (account,) = report.epochs
    assert (account.samples, account.delivered, account.outside, account.stray) == (train, train, SAMPLES - train, 0)
    with DistributedDataLoader(tars, batch_size=4, subset=SPLIT["val"], audit_dir=tmp_path):
        pass
    with pytest.raises(DatasetError, match="several subsets"):
        audit(tmp_path)


def test_skipping_batches_of_a_subset_ends_its_epoch_where_it_ends(tars):
    with DistributedDataLoader(tars, batch_size=7, subset=SPLIT["val"], last_batch="partial") as loader:
        loader.skip_batches(len(loader) + 1)
        state = loader.state_dict()
        assert (state["epoch"], state["consumed"]) == (1, 7)
        assert len(list(loader)) == len(loader) - 1


def test_an_audit_finds_samples_from_outside_of_the_subset(tars, tmp_path):
    with DistributedDataLoader(tars, batch_size=20, audit_dir=tmp_path) as loader:
        next(iter(loader))
    (log,) = tmp_path.iterdir()
    head, _, body = log.read_bytes().partition(b"\n")
    header = json.dumps({**json.loads(head), "subset": SPLIT["val"].to_dict()})  # as logs were before they told members
    log.write_bytes(header.encode() + b"\n" + body)
    (account,) = audit(tmp_path).epochs
    assert account.stray > 0
    assert account.delivered == 20
    assert not audit(tmp_path).is_exact


def change_header(log: Path, **changes: Any) -> None:
    head, _, body = log.read_bytes().partition(b"\n")
    log.write_bytes(json.dumps({**json.loads(head), **changes}).encode() + b"\n" + body)


def test_the_audit_of_a_subset_takes_the_time_of_what_was_delivered(tars, tmp_path):
    part, total = Subset.share(0, 0.5), 4_000_000_000
    with DistributedDataLoader(tars, batch_size=20, audit_dir=tmp_path, subset=part) as loader:
        next(iter(loader))
    (log,) = tmp_path.iterdir()
    before = time.process_time()
    change_header(log, num_samples=total, members=[total // 2 + 1, *part.bounds(total)])
    (account,) = audit(tmp_path).epochs
    assert (account.samples, account.delivered, account.stray) == (total // 2 + 1, 20, 0)
    for members in ([total // 3, *part.bounds(total)], [total // 2, 5, 6], [1], None, [total // 2, "", 0]):
        change_header(log, members=members)
        with pytest.raises(DatasetError, match="subset in the logs' headers is damaged"):
            audit(tmp_path)
    part = Subset.take(20)  # their ids may be anywhere
    change_header(log, num_samples=total, subset=part.to_dict(), members=[20, 0, 20 * (1 << 64) // total])
    assert audit(tmp_path).epochs[0].samples == 20
    head, _, body = log.read_bytes().partition(b"\n")
    old = {name: value for name, value in json.loads(head).items() if name != "members"}
    log.write_bytes(json.dumps(old).encode() + b"\n" + body)
    with pytest.raises(DatasetError, match="subset of 4,000,000,000 samples"):
        audit(tmp_path)
    assert time.process_time() - before < 5


def test_a_state_of_another_selection_is_refused_and_says_which(tars):
    def state_of(**options: Any) -> dict[str, Any]:
        with DistributedDataLoader(tars, batch_size=7, **options) as loader:
            return loader.state_dict()

    chosen = [{}, {"subset": SPLIT["train"]}, {"subset": SPLIT["val"]}, {"weights": np.arange(1, SAMPLES + 1)}]
    states = [state_of(**options) for options in chosen]
    assert [state["version"] for state in states] == [2, 3, 3, 3]
    for here, options in enumerate(chosen):
        with DistributedDataLoader(tars, batch_size=7, **options) as loader:
            for there, state in enumerate(states):
                if here == there:
                    loader.load_state_dict(state)
                    continue
                with pytest.raises(StateMismatchError, match=r"subset= and weights=: .* in the state, .* here"):
                    loader.load_state_dict(state)


def test_a_state_beyond_the_subsets_samples_is_refused(tars):
    with DistributedDataLoader(tars, batch_size=7, subset=Subset.take(57)) as loader:
        state = {**loader.state_dict(), "consumed": 58}
        del state["checksum"]
        with pytest.raises(StateMismatchError, match="consumed=58 of 57 samples"):
            loader.load_state_dict(state)
        assert len(list(loader)) == 8


def test_shards_without_a_chosen_sample_are_not_read(tmp_path):
    write_tars(tmp_path, SIZES)
    manifest = open_manifest(str(tmp_path))
    with DistributedDataLoader(manifest, batch_size=1, subset=Subset.take(1)) as loader:
        used, _ = manifest.shard_of(loader.dataset.ids[0])
        for shard in tmp_path.glob("*.tar"):
            if shard.name != used:
                shard.unlink()
        assert [len(list(loader)) for _ in range(3)] == [1, 1, 1]


def test_a_bad_chunk_is_replaced_by_samples_of_the_same_subset(tmp_path):
    write_tars(tmp_path, [60, 60, 60])
    manifest = open_manifest(str(tmp_path))
    shard = tmp_path / "shard-00001.tar"
    stat = shard.stat()
    shard.write_bytes(b"x" * stat.st_size)
    os.utime(shard, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.warns(BadChunkWarning):
        train, val = (ids_of(manifest, subset=part, max_bad_chunks=1) for part in SPLIT.values())
    assert len(train) + len(val) == 180
    assert {x // 60 for x in train + val} == {0, 2}
    assert not set(train) & set(val)


def test_shards_are_drawn_in_proportion_to_their_weights_in_every_epoch(tars):
    orders = []
    weights = {"*00001.tar": 3, "*": 1}
    with DistributedDataLoader(tars, batch_size=7, weights=weights, last_batch="partial", with_ids=True) as loader:
        for _ in range(3):
            ids = [sample_id for batch in loader for sample_id in batch["__id__"].tolist()]
            assert len(ids) == SAMPLES
            assert abs(sum(30 <= x < 80 for x in ids) - SAMPLES * 150 / (SAMPLES + 100)) < 1
            orders.append(ids)
    assert orders[0] != orders[1] != orders[2]
    world = [ids_of(tars, weights=weights, batch_size=None, global_batch_size=14, rank=r, world_size=2) for r in (0, 1)]
    assert sorted(world[0] + world[1]) == sorted(orders[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"subset": 0.1}, r"subset=0\.1: give a Subset"),
        ({"subset": SPLIT}, r"one of the parts, such as split\['train'\]"),
        ({"subset": Subset.take(1000)}, "has 247 samples"),
        ({"weights": {"*00001.tar": 3}}, "no pattern of .* fits the shard .*00000.tar' and 4 others; add '\\*'"),
        ({"weights": {"*": 3, "*.parquet": 1}}, r"no shard has its weight from \['\*\.parquet'\]"),
        ({"weights": {"*": 0}}, r"'\*': 0: weights are positive"),
        ({"weights": [1.0, 2.0]}, "2 of them for 247 samples"),
        ({"weights": np.ones(SAMPLES), "shuffle": False}, "weights= with shuffle=False"),
        ({"weights": np.ones(SAMPLES), "audit_dir": "x"}, "weights= with audit_dir="),
    ],
)
def test_selections_that_cannot_be_are_refused(tars, options, message):
    with pytest.raises(ConfigError, match=message):
        DistributedDataLoader(tars, batch_size=7, **options)
