"""What cannot be read of whole files is called by its name, and does not stand in the way of other columns."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock import DistributedDataLoader
from penstock.loader import FormatError

encryption = pytest.importorskip("pyarrow.parquet.encryption", reason="this pyarrow has no encryption")


def read(source: Path, columns: list[str] | None = None) -> dict[str, Any]:
    with DistributedDataLoader(str(source), batch_size=3, shuffle=False, columns=columns) as loader:
        return next(iter(loader))


class Keys(encryption.KmsClient):
    def __init__(self, config: object) -> None:
        encryption.KmsClient.__init__(self)

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)


@pytest.mark.parametrize(
    ("is_plain", "words"), [(True, "some of its columns are encrypted"), (False, "its footer is encrypted")]
)
def test_encrypted_columns_are_said_to_be_encrypted(tmp_path: Path, is_plain: bool, words: str) -> None:
    table = pa.table({"a": [1, 2, 3], "b": [4, 5, 6]})
    config = encryption.EncryptionConfiguration(
        footer_key="foot", column_keys={"column": ["a"]}, plaintext_footer=is_plain
    )
    factory = encryption.CryptoFactory(Keys)
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), config)
    with pq.ParquetWriter(tmp_path / "x.parquet", table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(FormatError, match=rf"x.parquet.*: {words}.*; decrypt the data set first"):
        read(tmp_path)


@pytest.mark.parametrize(("unit", "name"), [(0, "month_interval"), (1, "day_time_interval")])
def test_intervals_that_pyarrow_has_no_values_of_are_named(tmp_path: Path, unit: int, name: str) -> None:
    spans = pa.array([pa.MonthDayNano([1, 2, 3]), None, None], pa.month_day_nano_interval())
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema([("id", pa.int64()), ("span", spans.type)])) as writer:
        writer.write_table(pa.table({"id": [7, 8, 9], "span": spans}))
    data = bytearray(sink.getvalue().to_pybytes())
    assert data[110] == 2, "the unit of the interval"
    data[110] = unit
    assert str(pa.ipc.open_stream(bytes(data)).schema.field("span").type) == name
    (tmp_path / "s.arrows").write_bytes(data)
    with pytest.raises(FormatError, match=rf"s.arrows.*: column 'span' holds values of {name}.*columns="):
        read(tmp_path)
    assert read(tmp_path, ["id"])["id"].tolist() == [7, 8, 9]


def test_a_footer_that_denies_its_nulls_is_what_is_wrong(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"id": [1, 2, 3], "x": pa.array([5, None, None], pa.int64())}), path)
    path.write_bytes(_without_nulls(path.read_bytes()))
    with pytest.raises(FormatError, match=r"x.parquet: column 'x' holds nulls, and the shard's own footer.*write"):
        read(tmp_path)
    assert read(tmp_path, ["id"])["id"].tolist() == [1, 2, 3]


def _without_nulls(data: bytes) -> bytes:
    """The file with the footer's count of 2 nulls, a Thrift integer, as 0."""
    for place in range(len(data) - 1, 0, -1):
        if data[place] == 4:
            changed = data[:place] + b"\x00" + data[place + 1 :]
            try:
                footer = pq.read_metadata(pa.BufferReader(changed))
                statistics = footer.row_group(0).column(1).statistics
                if footer.num_rows == 3 and statistics.has_null_count and statistics.null_count == 0:
                    return changed
            except (OSError, AttributeError):
                continue
    raise AssertionError("no such count")
