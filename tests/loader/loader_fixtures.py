"""Fixtures of tests that read data sets."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.storage.memory_store import MemoryStore

_names = itertools.count()


@pytest.fixture(autouse=True)
def own_index_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Each test has a cache of its own, so that none sees what another built."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
    return folder


@pytest.fixture
def memory_store() -> Iterator[MemoryStore]:
    store = MemoryStore(f"mem://loader-{next(_names)}/data").create()
    yield store
    store.drop()


def parquet_bytes(rows: int, first: int = 0) -> bytes:
    sink = io.BytesIO()
    numbers = np.arange(first, first + rows)
    pq.write_table(pa.table({"n": numbers, "word": [f"w{n}" for n in numbers]}), sink, row_group_size=10)
    return sink.getvalue()


@pytest.fixture(scope="session")
def put_shards() -> Callable[..., list[int]]:
    """Put parquet shards of 25, 26, ... rows into a store; gives their numbers of rows."""

    def put(store: MemoryStore, count: int, stem: str = "part") -> list[int]:
        rows = [25 + number for number in range(count)]
        for number, size in enumerate(rows):
            store.put(f"{stem}-{number:03d}.parquet", parquet_bytes(size, 1000 * number))
        return rows

    return put
