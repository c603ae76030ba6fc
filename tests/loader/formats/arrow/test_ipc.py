from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from folder_store import FolderStore, index_all, open_all

from penstock.loader.columns import ArrayColumn, Block
from penstock.loader.errors import ConfigError, FormatError
from penstock.loader.formats.arrow.ipc import ArrowFormat
from penstock.loader.formats.shard import ChunkRef, ShardTask
from penstock.storage.memory_store import MemoryStore


@pytest.fixture
def arrow_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def sample_table(rows: int, *, dictionaries: bool) -> pa.Table:
    numbers = np.random.default_rng(0).integers(-100, 100, rows)
    columns = {
        "id": np.arange(rows),
        "count": pa.array([None if n % 6 == 0 else n for n in numbers], pa.int16()),
        "score": pa.array([None if n % 6 == 0 else n / 2 for n in numbers], pa.float32()),
        "flag": pa.array(numbers > 0),
        "text": pa.array([None if n % 4 == 0 else f"t{n}" for n in numbers]),
        "list": pa.array([[{"a": int(n)}] * (n % 3) for n in numbers]),
        "map": pa.array([[(str(n), int(n))] for n in numbers], pa.map_(pa.string(), pa.int32())),
        "vector": pa.FixedSizeListArray.from_arrays(pa.array(np.arange(rows * 3, dtype=np.float32)), 3),
        "word": pa.array([f"w{n % 9}" for n in numbers]),
        "last": pa.array([None if n % 8 == 0 else n % 5 for n in numbers], pa.uint8()),
    }
    if dictionaries:
        columns["word"] = columns["word"].dictionary_encode()
    return pa.table(columns)


def write(
    store: FolderStore, key: str, table: pa.Table, *, batch: int, stream: bool = False, **options: object
) -> None:
    sink = pa.BufferOutputStream()
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with new(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=batch)
    store.put(key, sink.getvalue())


def check(blocks: list[Block], table: pa.Table, names: list[str]) -> None:
    for name in names:
        got, missing = [], []
        for block in blocks:
            column = block.columns[name]
            dense = isinstance(column, ArrayColumn)
            got += column.values.tolist() if dense else column.take(np.arange(block.samples))
            marks = block.columns.get(f"{name}__null")
            missing += marks.values.tolist() if marks else [False] * block.samples
        assert [None if gone or value != value else value for value, gone in zip(got, missing, strict=True)] == table[
            name
        ].to_pylist(), name


@pytest.mark.parametrize("dictionaries", [False, True])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
def test_every_row_reads_as_pyarrow_wrote_it(
    arrow_store: FolderStore, dictionaries: bool, stream: bool, compression: str | None
) -> None:
    table = sample_table(300, dictionaries=dictionaries)
    write(arrow_store, "t.arrow", table, batch=70, stream=stream, compression=compression)
    for chunk_bytes in (1, 20_000, 1 << 20):
        blocks = open_all(arrow_store, ArrowFormat(chunk_bytes=chunk_bytes))
        assert len(blocks) == (5 if chunk_bytes == 1 else len(blocks))
        check(blocks, table, table.column_names)
        assert [name for name in blocks[0].columns if name.endswith("__null")] == ["count__null", "last__null"]


@pytest.mark.parametrize("compression", [None, "zstd"])
@pytest.mark.parametrize("dictionaries", [False, True])
def test_some_columns_in_any_order(arrow_store: FolderStore, compression: str | None, dictionaries: bool) -> None:
    table = sample_table(300, dictionaries=dictionaries)
    write(arrow_store, "t.arrow", table, batch=100, compression=compression)
    names = ["word", "id", "map"]
    blocks = open_all(arrow_store, ArrowFormat(), names)
    assert list(blocks[0].columns) == names
    check(blocks, table, names)


def test_small_batches_become_one_chunk_and_large_ones_their_own(arrow_store: FolderStore) -> None:
    table = pa.table({"x": np.arange(10_000)})
    for key, stream in (("a.arrow", False), ("b.arrows", True)):
        write(arrow_store, key, table, batch=100, stream=stream)
    _, found = index_all(arrow_store, ArrowFormat(chunk_bytes=10_000))
    for _, index in found:
        assert 5 < len(index.chunks) < 20
        assert all(span.length <= 10_000 for span in index.chunks)
        assert sum(span.samples for span in index.chunks) == 10_000


def test_numbers_of_an_uncompressed_shard_are_views_of_its_bytes(arrow_store: FolderStore) -> None:
    write(arrow_store, "t.arrow", pa.table({"x": np.arange(1000)}), batch=1000)
    fmt = ArrowFormat()
    schema, ((task, index),) = index_all(arrow_store, fmt)
    span = index.chunks[0]
    data = bytearray((arrow_store.root / "t.arrow").read_bytes())[span.offset : span.offset + span.length]
    chunk = ChunkRef(task.info, span.offset, span.length, span.samples, 0)
    block = fmt.open_chunk(chunk, fmt.open_shard(arrow_store, task.info), [memoryview(data)], None, schema)
    assert np.shares_memory(block.columns["x"].values, np.frombuffer(data, np.uint8))
    assert block.nbytes == span.length


def test_dictionaries_that_grow_are_read(arrow_store: FolderStore) -> None:
    schema = pa.schema({"w": pa.dictionary(pa.int32(), pa.string())})
    first = pa.record_batch([pa.DictionaryArray.from_arrays([0, 1], ["a", "b"])], schema)
    second = pa.record_batch([pa.DictionaryArray.from_arrays([2, 0], ["a", "b", "c"])], schema)
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    for key, new in (("f.arrow", pa.ipc.new_file), ("s.arrow", pa.ipc.new_stream)):
        sink = pa.BufferOutputStream()
        with new(sink, schema, options=options) as writer:
            writer.write_batch(first)
            writer.write_batch(second)
        arrow_store.put(key, sink.getvalue())
    blocks = open_all(arrow_store, ArrowFormat())
    words = [word for block in blocks for word in block.columns["w"].take(np.arange(block.samples))]
    assert words == ["a", "b", "c", "a"] * 2


def test_a_dictionary_that_is_replaced_is_refused(arrow_store: FolderStore) -> None:
    schema = pa.schema({"w": pa.dictionary(pa.int32(), pa.string())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        for words in (["a"], ["b"]):
            writer.write_batch(pa.record_batch([pa.DictionaryArray.from_arrays([0], words)], schema))
    arrow_store.put("s.arrow", sink.getvalue())
    with pytest.raises(FormatError, match="replaces dictionary"):
        index_all(arrow_store, ArrowFormat())


def test_indexing_skips_the_bodies_of_large_batches(arrow_store: FolderStore) -> None:
    table = pa.table({"x": np.random.default_rng(0).random(800_000)})
    for key, stream in (("a.arrow", False), ("b.arrow", True)):
        write(arrow_store, key, table, batch=200_000, stream=stream)
    index_all(arrow_store, ArrowFormat())
    assert sum(stop - start for _, start, stop in arrow_store.reads) < 1_000_000


def test_indexing_reads_many_small_batches_in_few_requests(arrow_store: FolderStore) -> None:
    write(arrow_store, "s.arrow", pa.table({"x": np.arange(200_000)}), batch=100, stream=True)
    _, ((_, index),) = index_all(arrow_store, ArrowFormat())
    assert sum(span.samples for span in index.chunks) == 200_000
    assert len(arrow_store.reads) < 12


def test_a_stream_without_its_end_mark_is_read(arrow_store: FolderStore) -> None:
    table = pa.table({"x": np.arange(50)})
    write(arrow_store, "s.arrow", table, batch=10, stream=True)
    arrow_store.put("s.arrow", (arrow_store.root / "s.arrow").read_bytes()[:-8])
    check(open_all(arrow_store, ArrowFormat()), table, ["x"])


@pytest.mark.parametrize("stream", [False, True])
def test_a_shard_cut_anywhere_is_an_error_or_ends_at_a_batch(arrow_store: FolderStore, stream: bool) -> None:
    write(arrow_store, "whole", pa.table({"x": np.arange(60), "s": ["ab"] * 60}), batch=20, stream=stream)
    whole = (arrow_store.root / "whole").read_bytes()
    for size in range(0, len(whole), 13):
        arrow_store.put("t.arrow", whole[:size])
        try:
            index = ArrowFormat().index_shard(arrow_store, ShardTask(arrow_store.head("t.arrow")))
        except FormatError:
            continue
        assert stream
        assert sum(span.samples for span in index.chunks) in (0, 20, 40, 60)


@pytest.mark.slow
@pytest.mark.parametrize("compression", [None, "lz4"])
@pytest.mark.parametrize("stream", [False, True])
def test_flipped_bytes_never_escape_as_a_foreign_error(
    arrow_store: FolderStore, stream: bool, compression: str | None
) -> None:
    table = sample_table(60, dictionaries=True)
    write(arrow_store, "whole", table, batch=20, stream=stream, compression=compression)
    whole = (arrow_store.root / "whole").read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, len(whole), 200):
        arrow_store.put("t.arrow", whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        try:
            blocks = open_all(arrow_store, ArrowFormat())
        except FormatError:
            refused += 1
            continue
        for block in blocks:
            block.columns["list"].take(np.arange(block.samples))
    assert 10 < refused < 200


@pytest.mark.parametrize("kind", [pa.string_view(), pa.list_(pa.string_view())], ids=str)
def test_a_view_that_points_out_of_its_buffer_is_refused(arrow_store: FolderStore, kind: pa.DataType) -> None:
    text = "longer than the twelve bytes of a view"
    write(
        arrow_store,
        "t.arrow",
        pa.table({"x": pa.array([text if kind == pa.string_view() else [text]] * 4, kind)}),
        batch=4,
    )
    whole = bytearray((arrow_store.root / "t.arrow").read_bytes())
    at = whole.index(len(text).to_bytes(4, "little") + text[:4].encode())  # length, prefix, buffer, offset
    whole[at + 12 : at + 16] = (1 << 30).to_bytes(4, "little")
    arrow_store.put("t.arrow", bytes(whole))
    with pytest.raises(FormatError, match="cannot be read"):
        open_all(arrow_store, ArrowFormat())


def test_text_that_ends_before_it_begins_is_refused(arrow_store: FolderStore) -> None:
    write(arrow_store, "t.arrow", pa.table({"x": ["aaaa", "bbbb", "cccc"]}), batch=3)
    whole = (arrow_store.root / "t.arrow").read_bytes()
    offsets = np.array([0, 4, 8, 12], np.int32).tobytes()
    arrow_store.put("t.arrow", whole.replace(offsets, np.array([0, 8, 4, 12], np.int32).tobytes()))
    with pytest.raises(FormatError, match="the offsets of column 'x' fall"):
        open_all(arrow_store, ArrowFormat())


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_no_flipped_bit_of_the_metadata_loses_a_row(arrow_store: FolderStore, stream: bool) -> None:
    write(arrow_store, "whole", pa.table({"x": np.zeros(6, np.int64)}), batch=2, stream=stream)
    whole = (arrow_store.root / "whole").read_bytes()
    (arrow_store.root / "whole").unlink()
    store = MemoryStore()
    refused, lost = 0, []
    for at in range(len(whole)):
        for bit in range(8):
            info = store.put("t.arrow", whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            try:
                index = ArrowFormat().index_shard(store, ShardTask(info))
            except FormatError:
                refused += 1
            else:
                rows = sum(span.samples for span in index.chunks)
                lost += [(at, bit, rows)] if rows != 6 else []
    assert lost == []
    assert refused > len(whole)


def footer_count_at(whole: bytes, batches: int) -> int:
    """Where the footer counts its record batches: before that many structs of 24 bytes."""
    first = whole.index(struct.pack("<i", batches), len(whole) - 10 - struct.unpack("<i", whole[-10:-6])[0])
    assert whole.count(struct.pack("<i", batches), first) >= 1
    return first


def test_a_footer_that_names_fewer_batches_than_there_are_is_an_error(arrow_store: FolderStore) -> None:
    write(arrow_store, "t.arrow", pa.table({"x": np.arange(700)}), batch=100)
    whole = bytearray((arrow_store.root / "t.arrow").read_bytes())
    whole[footer_count_at(bytes(whole), 7)] = 3
    arrow_store.put("t.arrow", whole)
    with pytest.raises(FormatError, match=r"its footer names nothing in bytes \d+ to \d+"):
        index_all(arrow_store, ArrowFormat())


def test_streams_that_were_joined_are_an_error(arrow_store: FolderStore) -> None:
    write(arrow_store, "t.arrow", pa.table({"x": np.arange(10)}), batch=5, stream=True)
    arrow_store.put("t.arrow", (arrow_store.root / "t.arrow").read_bytes() * 2)
    with pytest.raises(FormatError, match="after its end mark"):
        index_all(arrow_store, ArrowFormat())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "holds no bytes"),
        (b"FEA1" + bytes(100), "starts with"),
        (b"ARROW1\0\0" + bytes(100), "starts with"),
        (b"\xff\xff\xff\xff" + struct.pack("<i", -5) + bytes(50), "-5 bytes"),
        (b"\xff\xff\xff\xff" + struct.pack("<i", 5000) + bytes(50), "cut off"),
        (b"\xff\xff\xff\xff" + struct.pack("<i", 16) + b"\xff" * 50, "points at"),
        (b"\xff\xff\xff\xff\0\0\0\0", "does not start with a schema"),
    ],
)
def test_bytes_that_are_no_arrow_are_an_error_that_names_the_shard(
    arrow_store: FolderStore, data: bytes, message: str
) -> None:
    arrow_store.put("t.arrow", data)
    with pytest.raises(FormatError, match=message) as caught:
        index_all(arrow_store, ArrowFormat())
    assert caught.value.shard == "t.arrow"


def test_an_unknown_column_of_arrow_is_an_error(arrow_store: FolderStore) -> None:
    write(arrow_store, "t.arrow", pa.table({"x": [1]}), batch=1)
    with pytest.raises(ConfigError, match="'x'"):
        open_all(arrow_store, ArrowFormat(), ["y"])


@pytest.mark.parametrize("inside", [False, True])
def test_a_tensor_whose_axes_are_permuted_is_refused_by_name(arrow_store: FolderStore, inside: bool) -> None:
    images = np.zeros((2, 4, 5, 3), np.float32)
    write(arrow_store, "t.arrow", pa.table({"x": pa.FixedShapeTensorArray.from_numpy_ndarray(images)}), batch=2)
    schema, _ = index_all(arrow_store, ArrowFormat())
    assert schema["columns"]["x"]["type"] == "float32[4, 5, 3]"
    permuted = pa.FixedShapeTensorArray.from_numpy_ndarray(images.transpose(0, 3, 1, 2))
    column = pa.ListArray.from_arrays([0, 1, 2], permuted) if inside else permuted
    write(arrow_store, "t.arrow", pa.table({"x": column}), batch=2)
    with pytest.raises(FormatError, match=r"t\.arrow.*column 'x' is .*permutation.*write its values in the order"):
        index_all(arrow_store, ArrowFormat())


@pytest.mark.parametrize("inside", [False, True])
def test_a_run_end_encoded_column_is_refused_by_name(arrow_store: FolderStore, inside: bool) -> None:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3], pa.int32()), pa.array([7, 8]))
    column = pa.StructArray.from_arrays([runs], ["n"]) if inside else runs
    write(arrow_store, "t.arrow", pa.table({"x": column}), batch=3)
    with pytest.raises(FormatError, match=r"t\.arrow.*column 'x' is .*run_end_encoded"):
        index_all(arrow_store, ArrowFormat())


def test_config_makes_an_equal_arrow_format() -> None:
    assert ArrowFormat(**ArrowFormat(chunk_bytes=7).config()) == ArrowFormat(chunk_bytes=7)
    with pytest.raises(ConfigError):
        ArrowFormat(chunk_bytes=0)
