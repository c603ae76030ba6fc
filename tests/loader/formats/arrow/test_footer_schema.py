"""Files as Polars writes them: the schema before the batches is no message, and the footer's counts."""

from __future__ import annotations

import io
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from folder_store import FolderStore, index_all, open_all, rows_of

from penstock.loader.errors import FormatError
from penstock.loader.formats.arrow.ipc import ArrowFormat
from penstock.loader.formats.arrow.messages import parse_footer

TABLE = pa.table(
    {
        "id": np.arange(300),
        "text": [f"t{n}" for n in range(300)],
        "word": pa.array([f"w{n % 9}" for n in range(300)]).dictionary_encode(),
        "list": [[{"a": n}] * (n % 3) for n in range(300)],
    }
)


def file_like_polars(table: pa.Table, batch: int, compression: str | None = None) -> bytearray:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=batch)
    data = bytearray(sink.getvalue())
    assert data[8:12] == b"\xff\xff\xff\xff"
    data[8:16] = bytes(8)
    return data


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("names", [["id", "text", "list"], TABLE.column_names], ids=["plain", "dictionary"])
@pytest.mark.parametrize("chunk_bytes", [1, 1 << 20])
def test_a_file_whose_footer_alone_tells_the_schema_is_read(
    tmp_path: Path, names: list[str], compression: str | None, chunk_bytes: int
) -> None:
    (tmp_path / "t.arrow").write_bytes(file_like_polars(TABLE.select(names), 70, compression))
    blocks = open_all(FolderStore(tmp_path), ArrowFormat(chunk_bytes=chunk_bytes))
    assert [row for block in blocks for row in rows_of(block)] == TABLE.select(names).to_pylist()


def footer_start(data: bytearray) -> int:
    return len(data) - 10 - int.from_bytes(data[-10:-6], "little")


def test_a_batch_before_those_that_such_a_footer_names_is_an_error(tmp_path: Path) -> None:
    data = file_like_polars(TABLE.select(["id"]), 150)
    footer = footer_start(data)
    _, (first, second) = parse_footer(memoryview(bytes(data))[footer:-10])
    at = data.index(struct.pack("<q", first.offset), footer)
    data[at - 4 : at + 24] = struct.pack("<I", 1) + data[at + 24 : at + 48]
    assert parse_footer(memoryview(bytes(data))[footer:-10])[1] == [second]
    (tmp_path / "t.arrow").write_bytes(data)
    with pytest.raises(FormatError, match=r"t\.arrow at byte 8: its footer leaves out a batch"):
        index_all(FolderStore(tmp_path), ArrowFormat())


@pytest.mark.slow
def test_a_damaged_footer_of_such_a_file_is_an_error_that_names_the_shard(tmp_path: Path) -> None:
    whole = file_like_polars(TABLE.select(["id"]), 150)
    for at in range(footer_start(whole), len(whole)):
        data = bytearray(whole)
        data[at] ^= 0x55
        (tmp_path / "t.arrow").write_bytes(data)
        try:
            index_all(FolderStore(tmp_path), ArrowFormat())
        except FormatError as exc:
            assert "t.arrow" in str(exc)  # noqa: PT017 - other damage changes names alone
