"""Indexes of what samples cost: compact, exact, and refused where they are damaged or of other data."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from costed_docs import LENGTHS, make_loader, write_docs, write_index
from tar_dataset import write_tars

from penstock import Cost, open_manifest, pack
from penstock.loader import (
    ConfigError,
    CostExpression,
    DatasetError,
    index_costs,
    write_costs,
)
from penstock.storage import AccessDeniedError


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_docs(tmp_path_factory.mktemp("docs"))


@pytest.mark.slow
def test_indexes_of_values_lengths_and_bytes_are_compact_and_exact(docs):
    manifest = open_manifest(docs)
    for text in ("tokens", "len:text", "value:tokens"):
        values = index_costs(manifest, text)
        assert values.dtype == np.uint16
        assert values.tolist() == LENGTHS.tolist()
    assert index_costs(manifest, "x=bytes").tolist() == (2 * LENGTHS + 4 + 8).tolist()
    assert index_costs(manifest, "tokens*70").dtype == np.uint32
    assert index_costs(manifest, "tokens*0.5").tolist() == np.rint(LENGTHS * 0.5).tolist()


def test_an_index_of_tar_shards_takes_numbers_in_text_files_and_lengths_of_others(tmp_path):
    write_tars(tmp_path, [5, 7], value_bytes=9)
    manifest = open_manifest(str(tmp_path))
    assert index_costs(manifest, "txt").tolist() == list(range(12))
    assert index_costs(manifest, "len:bin").tolist() == [9] * 12


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ([1.0, 2.0, -3.0], r"b\.parquet: the cost 'c' of sample 4 \(number 2 of the shard\) is negative: -3"),
        ([1.0, None, 3.0], r"b\.parquet: the cost 'c' of sample 3 \(number 1 of the shard\) is missing"),
        ([float("nan"), 2.0, 3.0], r"sample 2 \(number 0 of the shard\) is missing or not a number"),
        ([1.0, 2.0, float("inf")], "sample 4 .*is too large"),
        ([1.0, 2.5, 3.0], r"sample 3 .*is no whole number: 2.5; .*c\*1000"),
        ([1.0, 2.0, 5e9], "sample 4 .*is too large"),
    ],
)
def test_costs_that_are_none_are_refused_by_sample_and_shard(tmp_path, values, problem):
    for name, column in (("a", [1.0, 2.0]), ("b", values)):
        pq.write_table(pa.table({"c": pa.array(column, pa.float64())}), tmp_path / f"{name}.parquet")
    with pytest.raises(DatasetError, match=problem):
        index_costs(open_manifest(str(tmp_path)), "c")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nope", "no field 'nope'"),
        ("text", "no number; for its length"),
        ("len:tokens", "no length"),
        ("a=b=c", "write"),
    ],
)
def test_expressions_that_are_no_costs_are_refused(docs, text, problem):
    with pytest.raises(ConfigError, match=problem):
        index_costs(open_manifest(docs), text)


def test_an_index_in_a_remote_store_is_fetched_once_a_node_and_again_where_its_copy_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    url = f"mem://costs-{tmp_path.name}/data/"
    pack([{"n": n, "tokens": n % 7} for n in range(100)], url, format="parquet", progress=False)
    write_index(url, "tokens")

    def first_batch() -> list[int]:
        with make_loader(url, 0, 2, batch_size=20, cost="tokens") as loader:
            return [int(n) for n in next(iter(loader))["n"]]

    expected = first_batch()
    (copy,) = (tmp_path / f"costs-{os.geteuid()}").glob("*.costs")
    kept = copy.stat().st_ino
    assert first_batch() == expected
    assert copy.stat().st_ino == kept
    for damaged in (b"", copy.read_bytes()[:-1]):
        copy.write_bytes(damaged)
        assert first_batch() == expected
    assert len(copy.read_bytes()) == 4096 + 2 * 100
    shutil.rmtree(copy.parent)
    copy.parent.write_text("in the way")  # the cache cannot be written
    with pytest.raises(AccessDeniedError, match="costs-"):
        first_batch()


def test_an_index_that_is_damaged_or_of_other_data_is_refused_and_says_what_to_run(docs, tmp_path):
    folder = tmp_path / "docs"
    shutil.copytree(docs, folder)
    with make_loader(str(folder), batch_size=4, cost="tokens"):  # a copy elsewhere is the same data set
        pass
    (index,) = folder.glob("*.costs")
    good = index.read_bytes()
    for damaged in (good[:-1], good[:-1] + bytes([good[-1] ^ 1]), b"", good[:4000], b"x" * len(good)):
        index.write_bytes(damaged)
        with pytest.raises(DatasetError, match=r"not a readable index of costs .*penstock index"):
            make_loader(str(folder), batch_size=4, cost=Cost())
    index.write_bytes(good)
    (folder / "8.parquet").unlink()
    with pytest.raises(DatasetError, match=r"no index of the costs 'tokens' for this data set as it is now"):
        make_loader(str(folder), batch_size=4, cost="tokens")


@pytest.mark.parametrize(
    ("name", "values", "expression"),
    [
        ("c.parquet", pa.array([1, 2, None]), "c"),
        ("c.parquet", pa.array([True, False, None]), "c"),
        ("c.jsonl", None, "c"),
    ],
)
def test_a_missing_whole_number_is_refused_too_and_not_taken_for_0(tmp_path, name, values, expression):
    if values is None:
        (tmp_path / name).write_text('{"c": 1}\n{"c": 2}\n{"d": 1}\n')
    else:
        pq.write_table(pa.table({"c": values}), tmp_path / name, row_group_size=2)
    with pytest.raises(DatasetError, match=r"sample 2 \(number 2 of the shard\) is missing"):
        index_costs(open_manifest(str(tmp_path)), expression, progress=False)


@pytest.mark.parametrize(
    "values", [np.zeros(2, np.uint16), np.zeros((3, 1), np.uint16), np.zeros(3), np.array([1, -2, 3]), [1, 2, 3]]
)
def test_what_is_no_index_is_not_written(tmp_path, values):
    pq.write_table(pa.table({"c": [1, 2, 3]}), tmp_path / "c.parquet")
    manifest = open_manifest(str(tmp_path))
    with pytest.raises(ConfigError, match=r"give one cost a sample, \(3,\) uint16 or uint32"):
        write_costs(manifest, CostExpression.parse("c"), values)
    assert not list(tmp_path.glob("*.costs"))


def test_lengths_are_those_of_values_not_of_what_encodes_them(tmp_path: Path) -> None:
    arrays, mixed = tmp_path / "arrays", tmp_path / "mixed"
    samples = [{"tokens": np.arange(n, dtype=np.int32)} for n in (1, 100)]
    pack(samples, arrays, format="mds")
    assert index_costs(open_manifest(arrays), "len:tokens").tolist() == [1, 100]
    mixed.mkdir()
    (mixed / "m.jsonl").write_text('{"m": [1, 2, 3]}\n{"m": [1, "x"]}\n{"m": "text"}\n')
    assert index_costs(open_manifest(mixed), "len:m").tolist() == [3, 2, 4]
    (mixed / "n.jsonl").write_text('{"m": 7}\n{"m": [1, "x"]}\n')
    with pytest.raises(ConfigError, match="of type int has no length"):
        index_costs(open_manifest(mixed), "len:m")
