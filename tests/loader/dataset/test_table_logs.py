"""Folders of Parquet files of which a log tells which count."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.loader import open_manifest
from penstock.loader.errors import DatasetError

LOGS = {
    "Delta Lake": "_delta_log/00000000000000000000.json",
    "Iceberg": "metadata/v1.metadata.json",
    "Hudi": ".hoodie/hoodie.properties",
}


def write(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.table({"x": [1, 2]}), path)
    else:
        path.write_text("{}")


@pytest.mark.parametrize("log", LOGS.values(), ids=LOGS)
@pytest.mark.parametrize("root", ["", "tables/clicks/"])
def test_a_table_whose_log_tells_its_files_is_refused_unless_they_are_named(
    tmp_path: Path, root: str, log: str
) -> None:
    for key in ("data/a.parquet", "b.parquet", log):
        write(tmp_path / root / key)
    name = next(name for name, key in LOGS.items() if key == log)
    with pytest.raises(DatasetError, match=rf"is a table of {name}, whose log.*\*\*/\*\.parquet"):
        open_manifest(tmp_path, progress=False)
    assert open_manifest(f"{tmp_path}/**/*.parquet", progress=False).num_samples == 4
    assert open_manifest([tmp_path / root / "b.parquet"], progress=False).num_samples == 2


def test_shards_beside_such_a_table_and_folders_of_like_names_are_read(tmp_path: Path) -> None:
    for key in ("data/a.parquet", "other/_delta_log/00000000000000000000.json", "metadata/columns.json"):
        write(tmp_path / key)
    assert open_manifest(tmp_path, progress=False).num_samples == 2
