"""Columns that only some shards have: nobody is refused who does not read them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader, open_manifest, pack, verify
from penstock.loader import FormatError, Keep, inspect_dataset

WRITERS: dict[str, Callable[[pa.Table, Path], Any]] = {
    "parquet": pq.write_table,
    "arrow": lambda table, path: feather.write_feather(table, path, compression="uncompressed"),
}
every_form = pytest.mark.parametrize("form", WRITERS)


def write_two(root: Path, form: str, one: dict[str, Any], two: dict[str, Any]) -> str:
    root.mkdir(exist_ok=True)
    WRITERS[form](pa.table(one), root / f"a.{form}")
    WRITERS[form](pa.table(two), root / f"b.{form}")
    return str(root)


def read_ids(source: str, **options: Any) -> list[int]:
    with DistributedDataLoader(source, batch_size=1, shuffle=False, **options) as loader:
        return [int(batch["id"]) for batch in loader]


@every_form
@pytest.mark.parametrize("first", [True, False])
def test_an_extra_column_of_one_shard_is_refused_only_where_it_is_read(tmp_path: Path, form: str, first: bool) -> None:
    plain, extra = {"id": [0, 1], "x": [5, None]}, {"id": [2, 3], "note": ["a", "b"], "x": [7, 8]}
    root = write_two(tmp_path / "in", form, *((extra, plain) if first else (plain, extra)))
    lacking = f"{'b' if first else 'a'}.{form}"
    assert sorted(read_ids(root, columns=["id"])) == [0, 1, 2, 3]
    assert len(read_ids(root, columns=["x", "id"])) == 4
    for options in ({}, {"columns": ["id", "note"]}):
        with pytest.raises(FormatError, match=rf"{lacking}: has no column 'note'.*leave it out with columns="):
            read_ids(root, **options)
    with pytest.raises(FormatError, match="'note'"):
        read_ids(root, columns=["id"], keep=Keep(["note"], lambda columns: columns["id"] > 0))
    assert read_ids(root, columns=["id"], keep=Keep(["x"], lambda columns: columns["x"] == 7)) == [2]
    assert inspect_dataset(root, progress=False).samples == 4
    flaws = verify(root, progress=False).flaws
    assert [(flaw.shard, flaw.kind) for flaw in flaws] == [(lacking, "FormatError")]
    with pytest.raises(FormatError, match="'note'"):
        pack(root, str(tmp_path / "out"), format="parquet", progress=False)


@every_form
def test_a_shard_that_comes_with_another_column_is_indexed_beside_the_known_ones(tmp_path: Path, form: str) -> None:
    root = write_two(tmp_path / "in", form, {"id": [0], "x": [1]}, {"id": [1], "x": [2]})
    (tmp_path / "in" / "penstock-manifest.arrow").write_bytes(open_manifest(root, progress=False).to_bytes())
    WRITERS[form](pa.table({"id": [2], "y": [2.0], "x": [3]}), tmp_path / "in" / f"c.{form}")
    with pytest.warns(UserWarning, match="out of date: 1 new"):
        assert read_ids(root, columns=["id"]) == [0, 1, 2]
    WRITERS[form](pa.table({"id": [3], "x": [4]}), tmp_path / "in" / f"d.{form}")
    with pytest.warns(UserWarning, match="out of date: 2 new"), pytest.raises(FormatError, match=f"a.{form}.*'y'"):
        read_ids(root)
