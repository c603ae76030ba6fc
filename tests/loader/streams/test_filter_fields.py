"""A loader that drops samples has the fields of one that drops none, and what decides sees which values are missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tar_dataset import write_tars

from penstock import DistributedDataLoader, Mixture, Packing, Source
from penstock.loader import ConfigError, Keep

OPTIONS: dict[str, Any] = {"batch_size": 4, "shuffle": False}
VALUES = [1, None, 0, 3] * 5
DROPPING: dict[str, dict[str, Any]] = {
    "Keep": {"keep": Keep(["n"], lambda columns: columns["n"] >= 0)},
    "keep": {"keep": lambda sample: True},
    "may_drop": {"transform": lambda sample: sample, "may_drop": True},
    "skip": {"on_error": "skip"},
}


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> str:
    """20 rows, of which ``v`` lacks every fourth; ``w__null`` is a column, since floats need no mark."""
    folder = tmp_path_factory.mktemp("table")
    columns = {
        "n": np.arange(20),
        "v": pa.array(VALUES, pa.int64()),
        "w": np.arange(20) / 2,
        "w__null": np.arange(20) + 100,
        "tokens": [[n, n] for n in range(20)],
    }
    pq.write_table(pa.table(columns), folder / "a.parquet", row_group_size=7)
    return str(folder)


@pytest.fixture(scope="module")
def tars(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tars")
    write_tars(folder, [20])
    return str(folder)


def first(source: Any, **options: Any) -> dict[str, Any]:
    with DistributedDataLoader(source, **{**OPTIONS, **options}) as loader:
        batch: dict[str, Any] = next(iter(loader))
        return batch


@pytest.mark.parametrize("dropping", DROPPING)
@pytest.mark.parametrize("columns", [None, ["v", "n"], ["n"], ["w", "v"], ["v", "w", "w__null"]])
def test_fields_are_those_of_a_loader_that_drops_nothing(table: str, dropping: str, columns: list[str] | None) -> None:
    plain = first(table, columns=columns)
    batch = first(table, columns=columns, **DROPPING[dropping])
    assert batch.keys() == plain.keys()
    assert all(list(batch[name]) == list(plain[name]) for name in plain)


@pytest.mark.parametrize("dropping", ["keep", "may_drop", "skip"])
def test_keys_of_tars_come_whatever_the_columns(tars: str, dropping: str) -> None:
    assert first(tars, columns=["txt"], **DROPPING[dropping])["__key__"] == first(tars, columns=["txt"])["__key__"]


def test_all_sources_of_a_mixture_of_which_one_drops_keep_their_fields(table: str, tars: str) -> None:
    for source, columns in ((table, ["v", "n"]), (tars, ["txt"])):
        both = Mixture({"a": Source(source), "b": Source(source)})
        one = Mixture({"a": Source(source), "b": Source(source, keep=lambda sample: True)})
        assert first(one, columns=columns).keys() == first(both, columns=columns).keys()


def test_a_transform_of_documents_gets_the_key_and_the_marks_of_nulls(table: str, tars: str) -> None:
    def of_value(sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": [9] if sample["v__null"] else [int(sample["v"])] * 2}

    def of_key(sample: dict[str, Any]) -> dict[str, Any]:
        return {"tokens": list(sample["__key__"].encode())}

    packing = Packing(seq_len=8, buffer_size=4)
    found = first(table, columns=["v"], transform=of_value, packing=packing, batch_size=1)
    assert sorted(found["tokens"][0].tolist()) == sorted([1, 1, 9, 0, 0, 3, 3, 0])  # the last one is padding
    assert first(tars, columns=["txt"], transform=of_key, packing=packing, batch_size=1)["tokens"][0, 0] == ord("0")


def test_a_predicate_of_columns_sees_which_values_are_missing(table: str) -> None:
    seen: list[set[str]] = []

    def is_there(columns: Mapping[str, Any]) -> Any:
        seen.append(set(columns))
        return ~columns["v__null"]

    for columns in (None, ["n"], ["n", "v"]):
        batch = first(table, columns=columns, keep=Keep(["v"], is_there), batch_size=15, with_ids=True)
        assert batch["__id__"].tolist() == [n for n in range(20) if VALUES[n] is not None]
        assert ("v__null" in batch) == (columns != ["n"])
    mixture = Mixture({"a": Source(table, keep=Keep(["v"], is_there)), "b": Source(table)})
    batch = first(mixture, columns=["n"], batch_size=20, with_ids=True)
    of_a = batch["__id__"][batch["__source__"] == 0].tolist()
    assert of_a
    assert all(VALUES[n] is not None for n in of_a)
    assert set(map(frozenset, seen)) == {frozenset({"v", "v__null"})}


def test_a_predicate_that_names_the_marks_is_told_where_they_are(table: str) -> None:
    with pytest.raises(ConfigError, match="'v__null' comes with 'v', if that has nulls"):
        DistributedDataLoader(table, keep=Keep(["v__null"], lambda columns: columns["v__null"]), **OPTIONS)
    batch = first(table, columns=["n"], keep=Keep(["w__null"], lambda columns: columns["w__null"] > 105))
    assert batch["n"].tolist() == [6, 7, 8, 9]
