"""Chunks of a mixture that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mixed_rows import write_rows

from penstock import DistributedDataLoader, Mixture, Source
from penstock.loader import BadChunkWarning
from penstock.loader.order.spans import ChunkRows
from penstock.storage import AccessDeniedError, PenstockError

OPTIONS: dict[str, Any] = {"batch_size": 10, "with_ids": True, "threads": 1}


@pytest.fixture
def mixed(tmp_path: Path) -> Mixture:
    """Two sources; of ``b`` the second shard, which is one chunk, is damaged."""
    good, bad = write_rows(tmp_path / "good", [30, 31]), write_rows(tmp_path / "bad", [20, 20])
    shard = tmp_path / "bad" / "001.parquet"
    data = bytearray(shard.read_bytes())
    data[:200] = bytes(200)
    shard.write_bytes(data)
    return Mixture({"a": Source(good), "b": Source(bad)}, stop="all_exhausted")


def test_unreadable_chunks_are_replaced_by_others_of_their_source_up_to_one_limit(mixed: Mixture) -> None:
    with DistributedDataLoader(mixed, **OPTIONS, max_bad_chunks=3) as loader:
        with pytest.warns(BadChunkWarning):
            batches = list(loader)
        assert all(chunk.shard.endswith("bad/001.parquet") for chunk in loader.bad_chunks)
        assert loader.bad_chunks
    assert all((batch["n"] == batch["__id__"]).all() for batch in batches)
    with (
        DistributedDataLoader(mixed, **OPTIONS) as loader,
        pytest.raises(PenstockError, match=r"001\.parquet") as raised,
    ):
        list(loader)
    assert "in the source 'b' of the mixture" in str(getattr(raised.value, "__notes__", ""))


def test_what_is_no_damage_is_told_as_it_is_where_the_limit_of_bad_chunks_is_used_up(mixed: Mixture) -> None:
    with DistributedDataLoader(mixed, **OPTIONS, max_bad_chunks=1) as loader:
        with pytest.warns(BadChunkWarning):
            list(loader)
        assert len(loader.bad_chunks) == 1
        refusal = AccessDeniedError("the store refuses")
        with pytest.raises(AccessDeniedError, match="the store refuses"):
            loader._run.reading.quarantine.replace(ChunkRows(0, np.arange(1), np.arange(1)), refusal)
