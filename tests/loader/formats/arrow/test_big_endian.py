"""Arrow files of machines whose bytes lie the other way round, made of pyarrow's: flags turned and values swapped."""

from __future__ import annotations

import datetime
import struct
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch

from penstock import DistributedDataLoader, pack
from penstock.loader.formats.arrow.messages import DICTIONARY, PREFIX_BYTES, SCHEMA, body_bytes, parse_message


def widths(kind: pa.DataType) -> list[tuple[int, ...]]:
    """The numbers that each value of a type's buffers consists of, in bytes, in the order of its buffers."""
    if pa.types.is_dictionary(kind):
        return widths(kind.index_type)
    children = [width for i in range(kind.num_fields) for width in widths(kind.field(i).type)]
    if pa.types.is_struct(kind) or pa.types.is_fixed_size_list(kind):
        return [(1,), *children]
    if pa.types.is_list(kind) or pa.types.is_map(kind):
        return [(1,), (4,), *children]
    if pa.types.is_large_list(kind):
        return [(1,), (8,), *children]
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return [(1,), (4,), (1,)]
    if pa.types.is_large_string(kind):
        return [(1,), (8,), (1,)]
    if pa.types.is_boolean(kind) or (pa.types.is_fixed_size_binary(kind) and not pa.types.is_decimal(kind)):
        return [(1,), (1,)]
    return [(1,), (kind.bit_width // 8,)]


def turn(table: pa.Table) -> bytes:
    """A table as a stream of a machine that writes the highest byte first."""
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    of_rows = [width for field in table.schema for width in widths(field.type)]
    turned = b"".join(_turned(sink.getvalue().to_pybytes(), of_rows, widths(pa.string())))
    assert pa.ipc.open_stream(turned).read_all().equals(table), "pyarrow reads what was made as what it was"
    return turned


def _turned(stream: bytes, of_rows: list[tuple[int, ...]], of_words: list[tuple[int, ...]]) -> Iterator[bytes]:
    at = 0
    while (length := struct.unpack_from("<i", stream, at + 4)[0]) != 0:
        metadata = bytearray(stream[at + PREFIX_BYTES : at + PREFIX_BYTES + length])
        at += PREFIX_BYTES + length
        message = parse_message(memoryview(metadata))
        body = bytearray(stream[at : at + body_bytes(memoryview(metadata))])
        at += len(body)
        if message.kind == SCHEMA:
            metadata = _flag(metadata)
        own = of_words if message.kind == DICTIONARY else of_rows
        for (start, size), (width,) in zip(message.buffers, own if message.buffers else [], strict=True):
            values = np.frombuffer(body, np.uint8, count=size // width * width, offset=start)
            values[:] = values.reshape(-1, width)[:, ::-1].reshape(-1)
        yield stream[:4] + struct.pack("<i", len(metadata)) + metadata + body
    yield stream[at:]


def _flag(metadata: bytearray) -> bytearray:
    """The schema's message with its endianness, which FlatBuffers leaves out where it is 0: in a table description of
    its own at the end, and behind that."""
    root = struct.unpack_from("<I", metadata)[0]
    vtable = root - struct.unpack_from("<i", metadata, root)[0]
    header = root + struct.unpack_from("<H", metadata, vtable + 4 + 2 * 2)[0]
    schema = header + struct.unpack_from("<I", metadata, header)[0]
    vtable = schema - struct.unpack_from("<i", metadata, schema)[0]
    own = metadata[vtable : vtable + struct.unpack_from("<H", metadata, vtable)[0]]
    struct.pack_into("<H", own, 4, len(metadata) + len(own) - schema)
    struct.pack_into("<i", metadata, schema, schema - len(metadata))
    turned = metadata + own + struct.pack("<h", 1)
    return turned + bytes(-len(turned) % 8)


ROWS = 7
GAPS = [None, 1, -2, 300, None, 70_000, 5]
TABLE = pa.table(
    {
        "id": pa.array(range(1000, 1000 + ROWS), pa.int64()),
        "tiny": pa.array(range(ROWS), pa.uint8()),
        "short": pa.array([1, None, -3, 256, 0, 0, 9], pa.int16()),
        "int": pa.array(GAPS, pa.int32()),
        "unsigned": pa.array([0, 1, 2**63 + 1, 3, 4, 5, 6], pa.uint64()),
        "half": pa.array(np.arange(ROWS, dtype=np.float16)),
        "float": pa.array([1.5, None, -2.25, 0, 0, 0, 1e30], pa.float32()),
        "double": pa.array([0.1 * i for i in range(ROWS)]),
        "flag": pa.array([True, None, False, True, True, False, None]),
        "day": pa.array([datetime.date(2024, 1, 1 + i) for i in range(ROWS)]),
        "when": pa.array([i * 10**15 for i in range(ROWS)], pa.timestamp("us")),
        "took": pa.array([1, None, 3, 4, 5, 6, 7], pa.duration("ms")),
        "price": pa.array([Decimal("1.25"), None, Decimal("-7.50"), *[Decimal("0.01")] * 4], pa.decimal128(10, 2)),
        "text": pa.array(["a", None, "", "grün", "xyz", "b", "c"]),
        "long": pa.array(["a", None, "", "grün", "xyz", "b", "c"], pa.large_string()),
        "raw": pa.array([b"\x01\x02", None, b"", b"3", b"45", b"6", b"7"]),
        "fixed": pa.array([b"%03d" % i for i in range(ROWS)], pa.binary(3)),
        "word": pa.array(["x", "y", None, "x", "x", "z", "y"]).dictionary_encode(),
        "list": pa.array([[1, 2], None, [], [3], [4], [5, None], [6]], pa.list_(pa.int32())),
        "vector": pa.array([[i, i + 0.5] for i in range(ROWS)], pa.list_(pa.float32(), 2)),
        "point": pa.array([{"x": i, "name": f"n{i}"} for i in range(ROWS)]),
        "counts": pa.array([[("a", i)] for i in range(ROWS)], pa.map_(pa.string(), pa.int16())),
    }
)


def read(source: str, columns: list[str] | None = None) -> dict[str, object]:
    with DistributedDataLoader(source, batch_size=ROWS, shuffle=False, columns=columns, decode=None) as loader:
        batch = next(iter(loader))
    return {name: values.tolist() if isinstance(values, torch.Tensor) else values for name, values in batch.items()}


PLAIN = TABLE.drop_columns(["word"])  # batches without dictionaries are read in another way


@pytest.mark.parametrize("columns", [None, ["int"], ["text", "vector"]])
@pytest.mark.parametrize("table", [TABLE, PLAIN], ids=["dictionary", "plain"])
def test_big_endian_shards_are_read_as_little_endian_ones(
    tmp_path: Path, table: pa.Table, columns: list[str] | None
) -> None:
    for name in ("big", "little"):
        (tmp_path / name).mkdir()
    (tmp_path / "big" / "s.arrows").write_bytes(turn(table))
    with pa.ipc.new_file(tmp_path / "little" / "s.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=4)
    got, expected = (read(str(tmp_path / name), columns) for name in ("big", "little"))
    assert str(got) == str(expected)  # as text, in which NaN equals NaN
    assert len(got) >= len(columns or table.column_names)


def test_big_endian_shards_are_packed_as_they_are_read(tmp_path: Path) -> None:
    (tmp_path / "s.arrows").write_bytes(turn(PLAIN))
    pack(str(tmp_path / "s.arrows"), str(tmp_path / "out"), format="arrow", progress=False)
    (packed,) = (tmp_path / "out").glob("shard-*")
    assert pa.ipc.open_file(packed).read_all().to_pylist() == PLAIN.to_pylist()
