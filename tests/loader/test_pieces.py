"""A data set of few chunks is shuffled by rows, and a state from before rows were shuffled keeps its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader

SAMPLES = 1000


@pytest.fixture(scope="module")
def one_chunk(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: Path = tmp_path_factory.mktemp("one")
    pq.write_table(pa.table({"x": np.arange(SAMPLES)}), folder / "a.parquet")
    return str(folder)


def epochs(source: str, count: int = 2, **options: Any) -> list[list[list[int]]]:
    with DistributedDataLoader(source, batch_size=16, **options) as loader:
        return [[batch["x"].tolist() for batch in loader] for _ in range(count)]


def sixteenths(batches: list[list[int]]) -> list[int]:
    """How many sixteenths of the data set each batch has samples of."""
    return [len({x * 16 // SAMPLES for x in batch}) for batch in batches]


def test_batches_of_one_chunk_are_not_one_sample_of_each_of_its_parts(one_chunk: str) -> None:
    whole = sixteenths(epochs(one_chunk, 1, piece=0)[0])
    by_rows = sixteenths(epochs(one_chunk, 1)[0])
    assert min(whole) == 16
    # Of sixteen throws on sixteen places 10.3 places are expected to be hit.
    assert 9 < np.mean(by_rows) < 11.5


def test_a_rank_of_many_gets_other_samples_of_one_chunk_in_each_epoch(one_chunk: str) -> None:
    first, second = ({x for batch in epoch for x in batch} for epoch in epochs(one_chunk, rank=2, world_size=8))
    assert len(first) == len(second) == 112
    assert len(first & second) < 40


def test_resuming_on_other_ranks_repeats_and_skips_no_row(one_chunk: str) -> None:
    with DistributedDataLoader(one_chunk, global_batch_size=50) as loader:
        seen = [x for _, batch in zip(range(7), loader, strict=False) for x in batch["x"].tolist()]
        state = loader.state_dict()
    assert state["piece"] == 1
    for rank in range(5):
        with DistributedDataLoader(one_chunk, global_batch_size=50, rank=rank, world_size=5) as loader:
            loader.load_state_dict(state)
            seen += [x for batch in loader for x in batch["x"].tolist()]
    assert sorted(seen) == list(range(SAMPLES))


def test_a_state_without_pieces_goes_on_in_the_order_that_it_began(one_chunk: str) -> None:
    with DistributedDataLoader(one_chunk, batch_size=16, piece=0) as loader:
        batches = iter(loader)
        for _ in range(5):
            next(batches)
        state = loader.state_dict()
        rest = [batch["x"].tolist() for batch in batches]
    assert "piece" not in state
    with DistributedDataLoader(one_chunk, batch_size=16) as resumed:
        resumed.load_state_dict(state)
        assert [batch["x"].tolist() for batch in resumed] == rest
        assert resumed.order.piece == 0
