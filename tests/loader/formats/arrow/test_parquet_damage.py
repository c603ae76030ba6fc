"""Damaged Parquet files end in an error of ours, never in a foreign one or the process's end."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from folder_store import FolderStore, index_all, open_all
from parquet_files import mixed_table, write

from penstock.loader.errors import FormatError
from penstock.loader.formats.arrow import parquet_footer
from penstock.loader.formats.arrow.parquet import ParquetFormat
from penstock.loader.formats.arrow.parquet_footer import read_footer
from penstock.loader.formats.shard import ChunkRef, ShardTask


@pytest.fixture
def parquet_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: b"", "holds no bytes"),
        (lambda data: b"PAR1", "too few"),
        (lambda data: data[:-1], "ends with"),
        (lambda data: data[: len(data) // 2], "ends with"),
        (lambda data: data[:-4] + b"PARE", "encrypted"),
        (lambda data: data[:-8] + b"\xff\xff\xff\x7fPAR1", "points outside"),
        (lambda data: data[:-200] + bytes(192) + data[-8:], "damaged"),
        (lambda data: data[:4] + data[4000:], "lies|is said to be|damaged"),
    ],
)
def test_a_damaged_footer_is_an_error_that_names_the_shard(
    parquet_store: FolderStore, damage: Callable[[bytes], bytes], message: str
) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": np.random.default_rng(0).random(2000)}), compression="none")
    parquet_store.put("t.parquet", damage((parquet_store.root / "t.parquet").read_bytes()))
    with pytest.raises(FormatError, match=message) as caught:
        ParquetFormat().index_shard(parquet_store, ShardTask(parquet_store.head("t.parquet")))
    assert caught.value.shard == "t.parquet"


@pytest.mark.parametrize(("start", "checksums"), [(4, False), (300, True)])
def test_damaged_data_is_an_error_that_names_shard_and_offset(
    parquet_store: FolderStore, start: int, checksums: bool
) -> None:
    table = pa.table({"x": np.arange(5000)})
    write(parquet_store, "t.parquet", table, compression="none", write_page_checksum=checksums)
    data = bytearray((parquet_store.root / "t.parquet").read_bytes())
    data[start : start + 30] = b"\xff" * 30
    parquet_store.put("t.parquet", data)
    with pytest.raises(FormatError, match="cannot be decoded") as caught:
        open_all(parquet_store, ParquetFormat())
    assert (caught.value.shard, caught.value.offset) == ("t.parquet", 4)


@pytest.mark.slow
def test_flipped_bytes_never_escape_as_a_foreign_error_nor_end_the_process(parquet_store: FolderStore) -> None:
    write(parquet_store, "whole", mixed_table(60).drop_columns(["half"]), row_group_size=20)
    whole = (parquet_store.root / "whole").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, len(whole), 200):
        parquet_store.put("t.parquet", whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        try:
            open_all(parquet_store, ParquetFormat())
        except FormatError as exc:
            refused += exc.shard == "t.parquet"
    assert refused > 20


def test_a_footer_that_pyarrow_would_abort_on_is_an_error(parquet_store: FolderStore) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": pa.array([1, 2], pa.int32())}), store_schema=False)
    data = (parquet_store.root / "t.parquet").read_bytes()
    # The type of the column's chunk: field 1 of ColumnMetaData, an enum; INT32 is 1 and stored as 2.
    at = data.rindex(b"\x15\x02\x19")
    parquet_store.put("t.parquet", data[: at + 1] + b"\x04" + data[at + 2 :])
    with pytest.raises(FormatError, match=r"other types than its schema|damaged"):
        index_all(parquet_store, ParquetFormat())


@pytest.mark.slow
def test_footers_are_judged_alike_with_and_without_a_file_in_python(
    parquet_store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros in place of the data take the place of a slow file in Python, for sound footers alone."""
    write(parquet_store, "a.parquet", pa.table({"n": range(6), "text": list("abcdef")}), row_group_size=2)
    whole = (parquet_store.root / "a.parquet").read_bytes()
    start = len(whole) - 8 - int.from_bytes(whole[-8:-4], "little")
    assert not judge(parquet_store, whole, monkeypatch, in_python=False)
    rng = random.Random(3)
    judged = []
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(rng.choice((1, 1, 3))):
            data[rng.randrange(start, len(data) - 8)] = rng.choice((0, 1, 12, 21, 25, 127, 255, rng.randrange(256)))
        slow = judge(parquet_store, bytes(data), monkeypatch, in_python=True)
        assert judge(parquet_store, bytes(data), monkeypatch, in_python=False) == slow
        judged.append(slow)
    assert 20 < sum(map(bool, judged)) < 130


def judge(store: FolderStore, data: bytes, monkeypatch: pytest.MonkeyPatch, *, in_python: bool) -> str:
    """What is said of a footer, '' for nothing."""
    (store.root / "a.parquet").write_bytes(data)
    with monkeypatch.context() as patch:
        if in_python:
            patch.setattr(parquet_footer, "_ZEROS", b"")
        try:
            read_footer(store, store.head("a.parquet"))
        except FormatError as error:
            return str(error)
    return ""


def test_a_plain_footer_is_checked_without_a_file_in_python(
    parquet_store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a file in Python, which dozens of threads would wait for")

    monkeypatch.setattr(parquet_footer, "_DatalessFile", refuse)
    write(parquet_store, "a.parquet", mixed_table(10))
    assert read_footer(parquet_store, parquet_store.head("a.parquet"))[0].num_rows == 10


def test_a_dictionary_that_claims_more_values_than_its_page_holds_is_refused(parquet_store: FolderStore) -> None:
    """pyarrow makes room for as many as it is told of: 17 GB for a page of 60 bytes."""
    for kind in (pa.string(), pa.int64()):
        table = pa.table({"x": pa.array([7, 7, 8]).cast(kind)})
        write(parquet_store, "t.parquet", table, store_schema=False, compression="none")
        data = bytearray((parquet_store.root / "t.parquet").read_bytes())
        at = data.index(b"\x4c\x15\x04") + 2  # field 7 of the page's header, its first field: 2 values
        data[at] = 0x7E
        parquet_store.put("t.parquet", bytes(data))
        with pytest.raises(FormatError, match="a dictionary of 63 values in a page of"):
            open_all(parquet_store, ParquetFormat())


def test_a_chunk_that_the_footer_does_not_know_is_an_error(parquet_store: FolderStore) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": np.arange(50)}), row_group_size=10)
    header = ParquetFormat().open_shard(parquet_store, parquet_store.head("t.parquet"))
    for first, samples in ((5, 10), (0, 15), (40, 20), (50, 10)):
        with pytest.raises(FormatError, match="index the data set again"):
            header.row_groups(ChunkRef(parquet_store.head("t.parquet"), 4, 10, samples, first))
