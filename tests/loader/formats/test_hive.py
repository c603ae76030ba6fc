"""Columns that stand in the paths of shards: read alike in every format of tables, against pyarrow's own reading."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
import torch

from penstock import DistributedDataLoader, Manifest, Mixture, Source, open_manifest, pack, verify
from penstock.loader import ConfigError, FormatError, Keep, inspect_dataset
from penstock.loader.dataset.manifest import MANIFEST_NAME


def _write_lines(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "parquet": lambda table, path: pq.write_table(table, path, row_group_size=2),
    "arrow": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
    "jsonl": _write_lines,
}
every_table = pytest.mark.parametrize("form", WRITERS)


def write_shards(root: Path, form: str, folders: Sequence[str], rows: int = 3) -> Path:
    """A shard of ``rows`` rows with rising ``id`` in each folder."""
    for number, folder in enumerate(folders):
        (root / folder).mkdir(parents=True, exist_ok=True)
        ids = range(number * rows, (number + 1) * rows)
        WRITERS[form](pa.table({"id": ids, "text": [f"t{i}" for i in ids]}), root / folder / f"part.{form}")
    return root


def read(source: Any, **options: Any) -> dict[str, Any]:
    """All samples as one batch, with tensors as lists."""
    with DistributedDataLoader(source, batch_size=100, shuffle=False, last_batch="partial", **options) as loader:
        (batch,) = list(loader)
    return {name: values.tolist() if isinstance(values, torch.Tensor) else values for name, values in batch.items()}


FOLDERS = ["year=2023/month=01/where=a%20b", "year=2023/month=02/where=c%2Fd", "year=2024/month=01/where=x"]


@every_table
def test_hive_columns_in_the_path_are_read_with_their_type(tmp_path: Path, form: str) -> None:
    root = write_shards(tmp_path, form, FOLDERS)
    batch = read(str(root))
    assert batch["id"] == list(range(9))
    expected = {
        "year": [2023] * 6 + [2024] * 3,
        "month": [1] * 3 + [2] * 3 + [1] * 3,
        "where": ["a b"] * 3 + ["c/d"] * 3 + ["x"] * 3,
    }
    assert {name: batch[name] for name in expected} == expected
    if form != "jsonl":  # pyarrow's reading is the reference
        theirs = ds.dataset(root, format=form if form == "parquet" else "ipc", partitioning="hive").to_table()
        theirs = theirs.sort_by("id")
        assert expected == {name: theirs[name].to_pylist() for name in expected}
    with DistributedDataLoader(str(root), batch_size=2) as loader:
        assert next(iter(loader))["year"].dtype == torch.int64


@pytest.mark.parametrize(
    ("values", "kind", "read_as"),
    [
        (["01", "-2"], "int64", [1, -2]),
        ([str(2**63 - 1), "0"], "int64", [2**63 - 1, 0]),
        ([str(2**63), "0"], "string", [str(2**63), "0"]),
        (["+1", "2"], "string", ["+1", "2"]),
        (["1.5", "2"], "string", ["1.5", "2"]),
        (["2024-01-01", "2024-01-02"], "string", ["2024-01-01", "2024-01-02"]),
        (["", "a=b"], "string", ["", "a=b"]),
        (["7", "__HIVE_DEFAULT_PARTITION__"], "int64", [7, None]),
        (["x", "__HIVE_DEFAULT_PARTITION__"], "string", ["x", None]),
        (["__HIVE_DEFAULT_PARTITION__"], "string", [None]),
        (["100%", "caf%C3%A9"], "string", ["100%", "café"]),
        (["%FF", "x"], "string", ["%FF", "x"]),
    ],
)
@every_table
def test_values_in_paths_have_one_type_over_the_data_set(
    tmp_path: Path, form: str, values: list[str], kind: str, read_as: list[Any]
) -> None:
    root = write_shards(tmp_path, form, [f"k={value}" for value in values], rows=1)
    assert open_manifest(str(root), progress=False).schema["columns"]["k"]["type"] == kind
    batch = read(str(root))
    told = dict(zip(batch["id"], batch["k"], strict=True))
    assert [told[i] for i in range(len(values))] == [0 if v is None and kind == "int64" else v for v in read_as]
    marks = dict(zip(batch["id"], batch.get("k__null", []), strict=False))
    if kind == "int64" and None in read_as:
        assert [marks[i] for i in range(len(values))] == [value is None for value in read_as]
    else:
        assert not marks


@every_table
def test_columns_of_paths_can_be_chosen_kept_by_and_decoded(tmp_path: Path, form: str) -> None:
    root = str(write_shards(tmp_path, form, FOLDERS))
    assert set(read(root, columns=["id"])) == {"id"}
    assert read(root, columns=["year"]) == {"year": [2023] * 6 + [2024] * 3}
    assert read(root, columns=["where", "id"])["where"] == ["a b"] * 3 + ["c/d"] * 3 + ["x"] * 3
    kept = read(root, keep=Keep(["year"], lambda columns: columns["year"] == 2024), columns=["id"])
    assert kept == {"id": [6, 7, 8]}
    assert read(root, keep=lambda sample: sample["month"] == 2)["id"] == [3, 4, 5]
    if form != "jsonl":
        assert read(root, decode={"where": str.upper})["where"] == ["A B"] * 3 + ["C/D"] * 3 + ["X"] * 3
    with pytest.raises(ConfigError, match="yeer"):
        read(root, columns=["yeer"])


@every_table
def test_columns_of_paths_are_inspected_verified_viewed_and_packed(tmp_path: Path, form: str) -> None:
    root = str(write_shards(tmp_path / "in", form, FOLDERS))
    fields = {field.name: field.value for field in inspect_dataset(root, progress=False).fields}
    assert (fields["year"], fields["where"]) == ("2023", "a b")
    assert verify(root, progress=False).ok
    with DistributedDataLoader(root, batch_size=2) as loader:
        assert loader.dataset[8]["year"] == 2024
        assert loader.dataset[8]["where"] == "x"
    for target in ("parquet", "jsonl"):
        pack(root, str(tmp_path / target), format=target, progress=False)
        batch = read(str(tmp_path / target))
        assert batch["year"] == [2023] * 6 + [2024] * 3
        assert batch["where"] == ["a b"] * 3 + ["c/d"] * 3 + ["x"] * 3


def test_a_mixture_has_the_columns_of_paths_of_its_sources(tmp_path: Path) -> None:
    one = write_shards(tmp_path / "one", "parquet", ["year=2023", "year=2024"])
    two = write_shards(tmp_path / "two", "arrow", ["year=2025", "year=2026"])
    mixture = Mixture({"one": Source(str(one)), "two": Source(str(two))})
    with DistributedDataLoader(mixture, batch_size=4) as loader:
        years = {int(year) for batch in loader for year in batch["year"]}
    assert years == {2023, 2024, 2025, 2026}


@every_table
def test_a_column_that_files_hold_themselves_is_the_files(tmp_path: Path, form: str) -> None:
    (tmp_path / "year=2023").mkdir()
    WRITERS[form](pa.table({"year": [7, 8]}), tmp_path / "year=2023" / f"a.{form}")
    assert read(str(tmp_path)) == {"year": [7, 8]}


@every_table
def test_shards_named_by_themselves_have_the_values_of_their_folders(tmp_path: Path, form: str) -> None:
    root = write_shards(tmp_path / "x=1" / "table", form, ["year=2023", "year=2024"])
    both = [f"{root}/year={year}/part.{form}" for year in (2023, 2024)]
    for source in (both[1], both[1:], f"{root}/year=2024/*.{form}"):
        batch = read(source)
        assert (batch["id"], batch["year"]) == ([3, 4, 5], [2024] * 3)
        assert "x" not in batch  # of the data set's place, not of the data set
    for source in (both, f"{root}/*/*.{form}", f"{root}/year={{2023,2024}}", str(root)):
        assert read(source)["year"] == [2023] * 3 + [2024] * 3
    assert set(read(f"{root}/year=2024")) == {"id", "text"}  # a folder is a data set of what is below it


def test_a_split_below_partitions_keeps_their_columns(tmp_path: Path) -> None:
    root = write_shards(tmp_path, "parquet", ["split=train/year=2023", "split=train/year=2024", "split=test/year=2025"])
    assert read(str(root), split="train")["year"] == [2023] * 3 + [2024] * 3
    assert read(str(root), split="test")["split"] == ["test"] * 3


@every_table
def test_keys_that_not_all_paths_have_are_refused_by_name_where_they_are_read(tmp_path: Path, form: str) -> None:
    root = str(write_shards(tmp_path, form, ["year=2023/month=1", "year=2024"]))
    with pytest.raises(FormatError, match=rf"year=2024/part.{form}: has no column 'month'.*columns="):
        read(root)
    assert read(root, columns=["id", "year"]) == {"id": list(range(6)), "year": [2023] * 3 + [2024] * 3}
    assert [flaw.shard for flaw in verify(root, progress=False).flaws] == [f"year=2024/part.{form}"]
    with pytest.raises(FormatError, match="'month'"):
        pack(root, str(tmp_path / "out"), format="parquet", progress=False)


@every_table
def test_manifests_and_states_of_before_columns_of_paths_are_read_go_on(tmp_path: Path, form: str) -> None:
    root = write_shards(tmp_path, form, FOLDERS)
    manifest = open_manifest(str(root), progress=False)
    data = manifest.to_bytes()
    stored = pa.ipc.open_stream(data).schema.metadata
    assert list(json.loads(stored[b"schema"])["columns"]) == ["id", "text"]
    assert json.loads(stored[b"schema"])["columns"]["id"].keys() == {"type", "nulls"}
    (root / MANIFEST_NAME).write_bytes(data)  # as one without a word of paths
    assert Manifest.from_bytes(data, manifest.url).schema == manifest.schema
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(str(root))["year"] == [2023] * 6 + [2024] * 3
        assert read(f"{root}/{MANIFEST_NAME}")["year"] == [2023] * 6 + [2024] * 3
    with DistributedDataLoader(str(root), batch_size=2, columns=["id"], seed=5) as loader:
        passing = iter(loader)
        first = next(passing)["id"].tolist()
        state = loader.state_dict()
        rest = [i for batch in passing for i in batch["id"].tolist()]
    with DistributedDataLoader(str(root), batch_size=2, seed=5) as loader:
        loader.load_state_dict(state)
        assert [i for batch in loader for i in batch["id"].tolist()] == rest
    assert len({*first, *rest}) == 8


def test_names_of_files_and_folders_of_other_formats_are_no_columns(tmp_path: Path) -> None:
    write_shards(tmp_path / "a", "parquet", ["plain"])
    (tmp_path / "a" / "plain" / "part.parquet").rename(tmp_path / "a" / "plain" / "k=v.parquet")
    assert set(read(str(tmp_path / "a"))) == {"id", "text"}
    pack([{"__key__": "0", "txt": "x"}], str(tmp_path / "b" / "k=v"), format="tar", progress=False)
    assert set(read(str(tmp_path / "b"))) == {"__key__", "txt"}
