"""Loaders that pack, against a reference in one process: any documents, settings, lanes, ranks, batches and resumes."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from naive_packing import sequences
from streams_ranks import ThreadRanks
from streams_reference import deal, lanes_of_ids

from penstock import Manifest, Packing
from penstock.loader import Keep, audit, open_manifest
from penstock.loader.order.plan import EpochPlan, Order

FILES = [37, 5, 61, 1, 23, 48]
EOS, PAD = 1, 0


def make_documents() -> list[list[int]]:
    """Documents of all lengths from none to several sequences, whose tokens differ from one another."""
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(2.0, 1.0, sum(FILES)).astype(int), 60)
    lengths[::17] = 0
    tokens = itertools.count(10)
    return [[next(tokens) for _ in range(length)] for length in lengths.tolist()]


DOCUMENTS = make_documents()


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Manifest:
    """Parquet shards of the documents; n is the sample id."""
    folder = tmp_path_factory.mktemp("documents")
    first = 0
    for number, size in enumerate(FILES):
        some = pa.array(DOCUMENTS[first : first + size], pa.list_(pa.int32()))
        table = pa.table({"tokens": some, "n": np.arange(first, first + size)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=16)
        first += size
    return open_manifest(str(folder))


def expected_batches(
    manifest: Manifest, order: dict[str, Any], packing: Packing, drop: int, sizes: Any, last_batch: str
) -> list[list[tuple[int, ...]]]:
    plan = EpochPlan(manifest.samples, Order(**order), 0)
    outputs = []
    for lane in lanes_of_ids(plan):
        assert isinstance(packing.buffer_size, int)
        units = [lane[at : at + packing.buffer_size] for at in range(0, len(lane), packing.buffer_size)]
        of_lane: list[tuple[int, ...]] = []
        for unit in units:
            of_lane += sequences(
                [DOCUMENTS[i] for i in unit if not drop or i % drop],
                seq_len=packing.seq_len,
                method=packing.method,
                long_documents=packing.long_documents,
                eos=EOS if packing.eos is not None else None,
            )
        outputs.append(of_lane)
    if len(set(itertools.chain(*outputs))) < sum(map(len, outputs)):
        return []  # sequences of eos alone, which the reference cannot tell apart
    return deal(outputs, plan.turns.tolist(), sizes, last_batch)


def rows_of(batch: dict[str, Any]) -> list[tuple[int, ...]]:
    rows = zip(batch["tokens"].tolist(), batch["document_ids"].tolist(), strict=True)
    valid = batch["__valid__"].tolist() if "__valid__" in batch else itertools.repeat(True)
    found = [tuple(t for t, i in zip(tokens, ids, strict=True) if i >= 0) for tokens, ids in rows]
    return [row for row, counts in zip(found, valid, strict=False) if counts]


PACKINGS = st.builds(
    Packing,
    seq_len=st.integers(4, 40),
    method=st.sampled_from(["best_fit", "concat"]),
    long_documents=st.sampled_from(["split", "truncate", "drop"]),
    pad=st.just(PAD),
    eos=st.sampled_from([None, EOS]),
    buffer_size=st.integers(1, 30),
)


@pytest.mark.slow
@settings(max_examples=30, phases=[Phase.explicit, Phase.generate])
@given(
    packing=PACKINGS,
    order=st.builds(
        dict,
        shuffle=st.just(True),
        lanes=st.sampled_from([1, 2, 4, 16]),
        window=st.integers(1, 4),
        seed=st.integers(0, 3),
        piece=st.sampled_from([0, 3]),
    ),
    legs=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 5), st.integers(0, 9)), min_size=1, max_size=3),
    last_batch=st.sampled_from(["drop", "pad", "partial"]),
    drop=st.sampled_from([0, 3]),
)
def test_global_batches_are_those_of_the_reference_on_any_ranks_and_across_resumes(
    documents: Manifest,
    tmp_path_factory: pytest.TempPathFactory,
    packing: Packing,
    order: dict[str, Any],
    legs: list[tuple[int, int, int]],
    last_batch: str,
    drop: int,
) -> None:
    sizes = itertools.chain(
        *([world_size * batch_size] * batches for world_size, batch_size, batches in legs[:-1]),
        itertools.repeat(legs[-1][0] * legs[-1][1]),
    )
    expected = expected_batches(documents, order, packing, drop, sizes, last_batch)
    if len(expected) < 2:
        return
    folder = tmp_path_factory.mktemp("audit")
    keep = {"keep": Keep(["n"], lambda columns: columns["n"] % drop != 0)} if drop else {}
    delivered: list[list[tuple[int, ...]]] = []
    state: dict[str, Any] | None = None
    for leg, (world_size, batch_size, batches) in enumerate(legs):
        most = None if leg == len(legs) - 1 else batches

        def run(loader: Any, state: Any = state, most: int | None = most) -> Any:
            if state is not None:
                loader.load_state_dict(json.loads(json.dumps(state)))
            got: list[Any] = []
            for batch in itertools.islice(loader, most):
                if loader.epoch:
                    break  # nothing was left of the first epoch
                got.append(rows_of(batch))
            return got, loader.state_dict()

        ranks = ThreadRanks(
            world_size,
            documents,
            batch_size=batch_size,
            packing=packing,
            last_batch=last_batch,
            audit_dir=folder,
            **order,
            **keep,
        )
        results = ranks.run(run)
        for result in results:
            if isinstance(result, Exception):
                raise result
        shares, states = zip(*results, strict=True)
        assert all(each == states[0] for each in states)
        delivered += [list(itertools.chain(*step)) for step in zip(*shares, strict=True)]
        state = states[0]
    assert delivered == expected
    assert state is not None
    if state["epoch"]:
        account = audit(folder).epochs[0]
        assert account.delivered + account.dropped + account.left == len(DOCUMENTS)
        assert (account.missing, account.duplicated) == (0, 0)


@pytest.mark.slow
def test_a_resume_on_other_ranks_gives_the_rest_of_the_same_batches(documents: Manifest, tmp_path: Path) -> None:
    options: dict[str, Any] = {"packing": Packing(seq_len=32, buffer_size=8), "lanes": 4, "last_batch": "partial"}

    def read(most: int | None, state: dict[str, Any] | None = None) -> Any:
        def run(loader: Any) -> Any:
            if state is not None:
                loader.load_state_dict(state)
            return [rows_of(batch) for batch in itertools.islice(loader, most)], loader.state_dict()

        return run

    def join(results: list[Any]) -> list[list[tuple[int, ...]]]:
        return [list(itertools.chain(*step)) for step in zip(*(share for share, _ in results), strict=True)]

    whole = join(ThreadRanks(1, documents, batch_size=6, **options).run(read(None)))
    first = ThreadRanks(2, documents, batch_size=3, **options).run(read(4))
    rest = ThreadRanks(3, documents, batch_size=2, **options).run(read(None, first[0][1]))
    assert join(first) + join(rest) == whole
    tokens = sorted(token for batch in whole for row in batch for token in row)
    assert tokens == sorted(token for one in DOCUMENTS for token in one)
