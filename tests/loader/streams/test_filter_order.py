"""Loaders that drop samples, against a reference in one process: any survivors, lanes, ranks, batches and resumes."""

from __future__ import annotations

import itertools
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from streams_ranks import ThreadRanks
from streams_reference import global_batches

from penstock import DistributedDataLoader, Manifest, audit
from penstock.loader import Keep, open_manifest
from penstock.loader.order.permutation import mix64
from penstock.loader.order.plan import EpochPlan, Order

SIZES = [37, 5, 80, 1, 64, 23, 90, 12, 7, 41]
TOTAL = sum(SIZES)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Parquet shards whose column n is the sample id."""
    folder = tmp_path_factory.mktemp("numbers")
    first = 0
    for number, size in enumerate(SIZES):
        table = pa.table({"n": np.arange(first, first + size), "word": [f"w{i}" for i in range(first, first + size)]})
        pq.write_table(table, folder / f"{number:02d}.parquet", row_group_size=16)
        first += size
    return open_manifest(str(folder))


class Survivors:
    """Some of the samples: by a hash, all but a stretch of ids, or only a stretch, so that lanes differ much."""

    def __init__(self, kind: str, share: float, salt: int) -> None:
        mixed = mix64(np.arange(TOTAL, dtype=np.uint64) + np.uint64(1000 * salt)) / 2.0**64
        ids = np.arange(TOTAL)
        low, high = sorted((share * TOTAL, (salt / 7) * TOTAL))
        inside = (ids >= low) & (ids < high)
        self.chosen = {"hash": mixed < share, "inside": inside, "outside": ~inside}[kind]

    def __call__(self, sample_id: int) -> bool:
        return bool(self.chosen[sample_id])

    def options(self, way: str) -> dict[str, Any]:
        """The arguments of a loader that drops all others."""
        if way == "columns":
            return {"keep": Keep(["n"], lambda columns: self.chosen[columns["n"]]), "columns": ["word"]}
        if way == "keep":
            return {"keep": lambda sample: self.chosen[sample["n"]]}
        return {"transform": lambda sample: sample if self.chosen[int(sample["n"])] else None, "may_drop": True}


def test_the_reference_reads_each_survivor_once(numbers: Manifest) -> None:
    survivors = Survivors("hash", 0.5, 1)
    plan = EpochPlan(numbers.samples, Order(lanes=8, window=2, seed=3), 0)
    batches = global_batches(plan, survivors, itertools.repeat(24), "partial")
    assert sorted(itertools.chain(*batches)) == np.flatnonzero(survivors.chosen).tolist()


@pytest.mark.slow
@settings(max_examples=30)
@given(
    survivors=st.builds(
        Survivors, st.sampled_from(["hash", "inside", "outside"]), st.floats(0.1, 1.0), st.integers(0, 6)
    ),
    way=st.sampled_from(["columns", "keep", "transform"]),
    order=st.builds(
        dict,
        shuffle=st.booleans(),
        lanes=st.sampled_from([1, 2, 4, 8, 32]),
        window=st.integers(1, 4),
        seed=st.integers(0, 3),
        piece=st.sampled_from([0, 3]),
    ),
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9), st.integers(0, 12)), min_size=1, max_size=4),
    last_batch=st.sampled_from(["drop", "pad", "partial"]),
)
def test_global_batches_are_those_of_the_reference_on_any_ranks_and_across_resumes(
    numbers: Manifest, survivors: Survivors, way: str, order: dict[str, Any], legs: Any, last_batch: str
) -> None:
    if not order["shuffle"]:
        order = {**order, "piece": 0}
    if survivors.chosen.sum() < 50:
        return
    sizes = itertools.chain(
        *([world_size * batch_size] * batches for world_size, batch_size, batches in legs[:-1]),
        itertools.repeat(legs[-1][0] * legs[-1][1]),
    )
    expected = global_batches(EpochPlan(numbers.samples, Order(**order), 0), survivors, sizes, last_batch)
    delivered: list[list[int]] = []
    folder = tempfile.mkdtemp()
    state: dict[str, Any] | None = None
    for leg, (world_size, batch_size, batches) in enumerate(legs):
        is_final = leg == len(legs) - 1

        def run(loader: Any, state: Any = state, most: int | None = None if is_final else batches) -> Any:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            if loader.state_dict()["epoch"]:
                return [], loader.state_dict()
            got = []
            for batch in itertools.islice(loader, most):
                if loader.epoch:
                    break  # what was left of epoch 0 fills no batch of this size
                got.append(ids_of(batch))
            return got, loader.state_dict()

        results = ThreadRanks(
            world_size,
            numbers,
            batch_size=batch_size,
            last_batch=last_batch,
            with_ids=True,
            audit_dir=folder,
            **order,
            **survivors.options(way),
        ).run(run)
        for result in results:
            if isinstance(result, Exception):
                raise result
        shares, states = zip(*results, strict=True)
        assert all(each == states[0] for each in states)
        assert {len(share) for share in shares} == {len(shares[0])}
        delivered += [list(itertools.chain(*step)) for step in zip(*shares, strict=True)]
        state = states[0]
    assert delivered == expected
    assert state is not None
    if delivered:
        account = audit(folder).epochs[0]
        assert (account.missing, account.duplicated, account.delivered) == (0, 0, sum(map(len, delivered)))
        if state["epoch"]:
            assert account.dropped == TOTAL - survivors.chosen.sum()
            assert account.delivered + account.dropped + account.left == TOTAL
    shutil.rmtree(folder)


def ids_of(batch: dict[str, Any]) -> list[int]:
    ids = batch["__id__"]
    valid = ids[batch["__valid__"]] if "__valid__" in batch else ids
    words = [f"w{i}" for i in ids.tolist()]
    assert list(batch["word"]) == words
    return valid.tolist()


def test_a_rest_that_fills_no_batch_after_a_resume_is_accounted_for(numbers: Manifest, tmp_path: Path) -> None:
    survivors = Survivors("hash", 0.5, 1)
    count = int(survivors.chosen.sum())
    options = {"rank": 0, "world_size": 1, "audit_dir": tmp_path, **survivors.options("transform")}
    with DistributedDataLoader(numbers, batch_size=1, **options) as loader:
        for _ in itertools.islice(loader, count - 5):
            pass
        state = loader.state_dict()
    assert state["epoch"] == 0
    with DistributedDataLoader(numbers, batch_size=8, **options) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
        assert loader.epoch == 1
    report = audit(tmp_path)
    assert report.is_exact
    first = report.epochs[0]
    assert (first.delivered, first.dropped, first.left) == (count - 5, TOTAL - count, 5)
