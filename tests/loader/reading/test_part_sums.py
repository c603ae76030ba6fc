"""Checksums of the parts of chunks: what ``columns=`` reads is compared, too."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader, Manifest, open_manifest, pack
from penstock.cli.index import run as run_index
from penstock.loader import ChecksumError, DatasetError, UncheckedColumnsWarning
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.loader.reading import checksum

ROWS = 4000


def write(folder: Path) -> Path:
    """Two shards of plain values, in row groups of 500 rows; returns the first."""
    folder.mkdir()
    for number in range(2):
        values = np.arange(ROWS, dtype=np.int64) + number * ROWS
        table = pa.table({name: values * factor for name, factor in (("a", 1), ("b", 3), ("c", 5))})
        pq.write_table(
            table, folder / f"{number}.parquet", row_group_size=500, compression="none", use_dictionary=False
        )
    return folder / "0.parquet"


def flip(shard: Path, column: int) -> None:
    """Change one value of a column: the file stays one that any reader takes."""
    place = pq.ParquetFile(shard).metadata.row_group(3).column(column)
    data = bytearray(shard.read_bytes())
    data[place.data_page_offset + place.total_compressed_size - 5] ^= 1
    shard.write_bytes(data)


def read(folder: Path, columns: list[str] | None) -> int:
    with DistributedDataLoader(
        Manifest.from_bytes(manifest(folder), str(folder) + "/"), batch_size=100, columns=columns
    ) as loader:
        return sum(len(batch["a"]) for batch in loader)


def manifest(folder: Path) -> bytes:
    """The saved one, with the shards' present ETags: what changes a disk's bytes need not change those."""
    saved = Manifest.from_bytes((folder / MANIFEST_NAME).read_bytes(), str(folder) + "/")
    fresh = open_manifest(str(folder), rebuild=True)
    return replace(saved, shards=fresh.shards).to_bytes()


@pytest.mark.parametrize("columns", [None, ["a"], ["a", "c"], ["a", "b"]])
def test_a_damaged_value_is_an_error_whatever_columns_are_read(tmp_path: Path, columns: list[str] | None) -> None:
    shard = write(tmp_path / "data")
    assert run_index([str(tmp_path / "data")]) == 0
    assert read(tmp_path / "data", columns) == 2 * ROWS
    flip(shard, 0)
    with pytest.raises(ChecksumError, match=r"0\.parquet at byte \d+: .*the manifest holds"):
        read(tmp_path / "data", columns)


def test_what_pack_writes_has_the_checksums_that_index_adds(tmp_path: Path) -> None:
    write(tmp_path / "data")
    pack(str(tmp_path / "data"), str(tmp_path / "packed"), format="parquet")
    packed = (tmp_path / "packed" / MANIFEST_NAME).read_bytes()
    (tmp_path / "packed" / MANIFEST_NAME).unlink()
    assert run_index([str(tmp_path / "packed")]) == 0
    one, other = (
        Manifest.from_bytes(data, "") for data in (packed, (tmp_path / "packed" / MANIFEST_NAME).read_bytes())
    )
    assert one.parts is not None
    assert other.parts is not None
    assert one.parts.sums.tolist() == other.parts.sums.tolist()
    assert one.parts.starts.tolist() == other.parts.starts.tolist()


@pytest.mark.slow
def test_a_manifest_that_an_older_penstock_wrote_is_read_with_a_warning_and_index_completes_it(tmp_path: Path) -> None:
    write(tmp_path / "data")
    assert run_index([str(tmp_path / "data")]) == 0
    path = tmp_path / "data" / MANIFEST_NAME
    whole = Manifest.from_bytes(path.read_bytes(), "")
    old = replace(whole, parts=None)
    assert old.fingerprint == whole.fingerprint
    # The newer one begins with all of the older one, which is where an older penstock stops reading.
    assert path.read_bytes().startswith(old.to_bytes())
    path.write_bytes(old.to_bytes())
    with pytest.warns(UncheckedColumnsWarning, match="penstock index"):
        assert read(tmp_path / "data", ["a"]) == 2 * ROWS
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read(tmp_path / "data", None) == 2 * ROWS
        assert run_index([str(tmp_path / "data")]) == 0
        assert read(tmp_path / "data", ["a"]) == 2 * ROWS


@pytest.mark.parametrize(("columns", "warned"), [(None, 0), (["x", "data"], 1)])
def test_a_loader_warns_once_of_an_older_manifest_however_it_reads(
    tmp_path: Path, columns: list[str] | None, warned: int
) -> None:
    (tmp_path / "data").mkdir()
    for number in range(2):
        table = pa.table({"x": range(64), "y": range(64), "data": [b"raw"] * 64, "more": [b"also raw"] * 64})
        pq.write_table(table, tmp_path / "data" / f"{number}.parquet")
    old = replace(checksum.sum_chunks(open_manifest(str(tmp_path / "data")), progress=False), parts=None)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with DistributedDataLoader(old, batch_size=8, columns=columns) as loader:
            loader.peek()
            assert len(list(loader)) == 16
            assert loader.dataset[0]["data"] == b"raw"
    assert [warning.category for warning in caught] == [UncheckedColumnsWarning] * warned


def test_damaged_checksums_of_parts_are_no_manifest(tmp_path: Path) -> None:
    write(tmp_path / "data")
    assert run_index([str(tmp_path / "data")]) == 0
    data = bytearray((tmp_path / "data" / MANIFEST_NAME).read_bytes())
    whole = Manifest.from_bytes(data, "")
    assert whole.parts is not None
    data[data.index(whole.parts.sums.tobytes()) + 3] ^= 1
    with pytest.raises(DatasetError, match="parts do not fit"):
        Manifest.from_bytes(data, "")


def test_some_shards_of_a_manifest_keep_their_checksums_of_parts(tmp_path: Path) -> None:
    write(tmp_path / "data")
    assert run_index([str(tmp_path / "data")]) == 0
    whole, some = open_manifest(str(tmp_path / "data")), open_manifest(str(tmp_path / "data" / "1.parquet"))
    assert whole.parts is not None
    assert some.parts is not None
    assert some.parts.sums.tolist() == whole.parts.sums[len(whole.parts.sums) // 2 :].tolist()


def test_index_reads_only_what_is_new_for_its_checksums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write(tmp_path / "data")
    assert run_index([str(tmp_path / "data")]) == 0
    (tmp_path / "data" / "2.parquet").write_bytes(shard.read_bytes())
    summed: list[str] = []
    real = checksum.sum_chunk
    monkeypatch.setattr(checksum, "sum_chunk", lambda *given: (summed.append(given[3].shard.key), real(*given))[1])
    assert run_index([str(tmp_path / "data")]) == 0
    assert summed == ["2.parquet"]
    mended = (tmp_path / "data" / MANIFEST_NAME).read_bytes()
    assert run_index([str(tmp_path / "data"), "--rebuild"]) == 0
    assert (tmp_path / "data" / MANIFEST_NAME).read_bytes() == mended


def test_an_index_without_checksums_is_made_where_it_is_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "data")
    assert run_index([str(tmp_path / "data"), "--no-checksums"]) == 0
    saved = Manifest.from_bytes((tmp_path / "data" / MANIFEST_NAME).read_bytes(), "")
    assert (saved.checksums, saved.parts) == (None, None)
