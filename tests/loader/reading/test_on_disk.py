"""Chunks that are too large for memory are opened onto the disk: the same batches, of one read."""

from __future__ import annotations

import gc
import os
import tempfile
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from penstock import DistributedDataLoader, Manifest, open_manifest
from penstock.loader import ChecksumError, MemoryLimitError
from penstock.loader.reading import chunk_source, on_disk
from penstock.loader.reading.checksum import sum_chunks

ROWS = 3000
pytestmark = pytest.mark.filterwarnings("ignore::penstock.loader.MemoryLimitWarning")


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks above 400 kB are large, and opened in pieces of 40 kB."""
    monkeypatch.setattr(chunk_source, "ALWAYS_BYTES", 400_000)
    monkeypatch.setattr(chunk_source, "_PIECE_BYTES", 40_000)


def make_table(rows: int = ROWS) -> pa.Table:
    """A column of each kind, with nulls, and as many narrow ones as make records."""
    rng = np.random.default_rng(0)

    def holes(values: list[Any]) -> list[Any]:
        return [None if row % 7 == 3 else value for row, value in enumerate(values)]

    numbers = rng.integers(0, 1 << 40, rows)
    texts = [f"{number} ü" * int(number % 9) for number in numbers]
    return pa.table(
        {
            **{f"f{i}": rng.random(rows) for i in range(5)},
            "ints": pa.array(holes(numbers.tolist())),
            "bools": pa.array(holes((numbers % 2 == 0).tolist())),
            "days": pa.array(numbers.astype(np.int32) % 9999, pa.int32()).cast(pa.date32()),
            "vectors": pa.FixedSizeListArray.from_arrays(pa.array(rng.random(4 * rows)), 4),
            "texts": pa.array(holes(texts)),
            "binaries": pa.array(holes([text.encode() for text in texts]), pa.large_binary()),
            "tags": pa.array(holes([f"tag {number % 5}" for number in numbers])),
            "lists": pa.array(holes([list(range(number % 5)) for number in numbers]), pa.list_(pa.int32())),
            "structs": pa.array(holes([{"a": int(number), "b": [str(number)]} for number in numbers])),
        }
    )


def write_parquet(folder: Path, table: pa.Table | None = None) -> str:
    folder.mkdir()
    table = make_table() if table is None else table
    half = len(table) // 2
    for name, part in (("a", table[:half]), ("b", table[half:])):
        pq.write_table(part, folder / f"{name}.parquet", row_group_size=half)
    return str(folder)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    plain = [[bytes(value) if isinstance(value, memoryview) else value for value in values] for values in (one, other)]
    return plain[0] == plain[1]


def read(source: str | Manifest, memory_limit: str, **options: Any) -> tuple[list[dict[str, Any]], int]:
    """All batches, and how many chunks were fetched for them."""
    options = {"seed": 3, "window": 2, "lanes": 2, **options}
    with DistributedDataLoader(source, batch_size=50, memory_limit=memory_limit, with_ids=True, **options) as loader:
        return list(loader), loader.metrics().fetched_chunks


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"shuffle": False},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"piece": 1}, marks=pytest.mark.slow),
        pytest.param({"raw": "view", "decode": None}, marks=pytest.mark.slow),
    ],
)
def test_row_groups_above_the_limit_give_the_same_batches_and_are_read_once(
    tmp_path: Path, small_limits: None, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet(tmp_path / "data")
    expected, _ = read(source, "1GiB", **options)
    opened = []
    join = on_disk.join_on_disk
    monkeypatch.setattr(on_disk, "join_on_disk", lambda *given: opened.append(1) or join(*given))
    found, fetched = read(source, "400kB", **options)
    assert len(opened) == fetched == 2
    assert len(found) == len(expected) == ROWS // 50
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(same(one[name], other[name]) for name in one)
    assert sorted(i for batch in found for i in batch["__id__"].tolist()) == list(range(ROWS))


@pytest.mark.slow
def test_a_large_row_group_with_wrong_bytes_is_an_error(tmp_path: Path, small_limits: None) -> None:
    source = write_parquet(tmp_path / "data")
    manifest = sum_chunks(open_manifest(source, progress=False), progress=False)
    shard = tmp_path / "data" / "a.parquet"
    before = shard.stat()
    with shard.open("r+b") as file:
        file.seek(before.st_size // 2)
        file.write(b"damaged")
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ChecksumError, match=r"a\.parquet"):
        read(manifest, "400kB")


def test_a_row_group_that_fits_neither_into_memory_nor_onto_the_disk_is_refused_by_name(
    tmp_path: Path, small_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet(tmp_path / "data")
    kept = r"a\.parquet at byte 4: .* the limit is 400,000, and it cannot be opened in .* set TMPDIR"

    def write_nothing(*_: object) -> None:
        raise OSError(28, "No space left on device")

    space = namedtuple("Space", "f_bavail f_frsize")(10, 4096)
    for place, name, value, why in (
        (on_disk, "_kind_of_disk", lambda _: "tmpfs", "it lies in memory itself"),
        (on_disk.os, "statvfs", lambda _: space, "40,960 bytes are free there"),
        (on_disk, "write_all", write_nothing, "No space left on device"),
    ):
        with monkeypatch.context() as patched:
            patched.setattr(place, name, value)
            with pytest.raises(MemoryLimitError, match=kept) as refused:
                read(source, "400kB", shuffle=False)
            assert why in str(refused.value)


@pytest.mark.slow
def test_nothing_is_left_of_what_was_opened_onto_the_disk(
    tmp_path: Path, small_limits: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_parquet(tmp_path / "data")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    with DistributedDataLoader(source, batch_size=50, memory_limit="400kB") as loader:
        batches = iter(loader)
        next(batches)
        assert list((tmp_path / "temporary").iterdir()) == []
        assert all(in_use(tmp_path / "temporary"))
        del batches
    gc.collect()
    assert in_use(tmp_path / "temporary") == ([], [])


def in_use(folder: Path) -> tuple[list[str], list[str]]:
    """The files in a folder, those without a name among them, that this process has open, and has mapped."""
    open_files = [os.path.realpath(path) for path in Path("/proc/self/fd").iterdir()]
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return [path for path in open_files if str(folder) in path], [line for line in mapped if str(folder) in line]
