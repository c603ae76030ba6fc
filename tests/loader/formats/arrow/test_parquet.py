from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from folder_store import FolderStore, index_all, open_all
from parquet_files import mixed_table, write

from penstock.loader.columns import ArrayColumn, Block, BytesColumn, ObjectColumn
from penstock.loader.errors import ConfigError, FormatError
from penstock.loader.formats.arrow.parquet import ParquetFormat
from penstock.loader.formats.shard import ChunkRef, ShardTask


@pytest.fixture
def parquet_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def values_of(block: Block, name: str) -> list[Any]:
    column = block.columns[name]
    rows = np.arange(block.samples)
    return column.values.tolist() if isinstance(column, ArrayColumn) else column.take(rows)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("row_group_size", "compression"),
    [(7, "snappy"), (100, "none"), (1000, "snappy"), (100, "zstd"), (1000, "gzip")],
)
def test_every_row_reads_as_pyarrow_reads_it(
    parquet_store: FolderStore, compression: str | None, row_group_size: int
) -> None:
    tables = [mixed_table(1000, seed=1), mixed_table(333, seed=2)]
    for i, table in enumerate(tables):
        write(parquet_store, f"p{i}.parquet", table, compression=compression, row_group_size=row_group_size)
    blocks = open_all(parquet_store, ParquetFormat(chunk_bytes=20_000))
    want = pa.concat_tables(pq.read_table(parquet_store.root / f"p{i}.parquet") for i in range(2))
    assert sum(block.samples for block in blocks) == 1333
    for name in want.column_names:
        got = [value for block in blocks for value in values_of(block, name)]
        column = want.column(name)
        expected = column.cast(pa.int64()).to_pylist() if name == "when" else column.to_pylist()
        assert got == expected, name
    assert {name: type(column) for name, column in blocks[0].columns.items()} == {
        "id": ArrayColumn,
        "small": ArrayColumn,
        "half": ArrayColumn,
        "flag": ArrayColumn,
        "name": BytesColumn,
        "raw": BytesColumn,
        "list": ObjectColumn,
        "map": ObjectColumn,
        "struct": ObjectColumn,
        "vector": ArrayColumn,
        "when": ArrayColumn,
        "city": BytesColumn,
    }
    assert blocks[0].columns["half"].values.dtype == np.float16
    assert blocks[0].columns["vector"].values.shape == (blocks[0].samples, 4)


@pytest.mark.parametrize("words", [30, 3], ids=["of their own", "repeated"])
def test_dictionaries_inside_of_lists_and_structs_are_read_from_row_groups_together(
    parquet_store: FolderStore, words: int
) -> None:
    kinds = pa.list_(pa.dictionary(pa.int8(), pa.string()))
    lists = pa.array([[f"v{n % words}"] * (n % 3) for n in range(600)], kinds)
    names = pa.array([f"s{n % words}" for n in range(600)]).dictionary_encode()
    table = pa.table({"list": lists, "struct": pa.StructArray.from_arrays([names], ["name"])})
    write(parquet_store, "p.parquet", table, row_group_size=200)
    (block,) = open_all(parquet_store, ParquetFormat())
    assert {name: values_of(block, name) for name in table.column_names} == table.to_pydict()


@pytest.mark.parametrize("columns", [None, ["name", "id"]])
def test_row_groups_without_rows_among_others_are_passed_over(
    parquet_store: FolderStore, columns: list[str] | None
) -> None:
    table = mixed_table(300)
    with pq.ParquetWriter(parquet_store.root / "p.parquet", table.schema) as writer:
        for start, rows in ((0, 0), (0, 100), (100, 0), (100, 200), (300, 0)):
            writer.write_table(table.slice(start, rows))
    (block,) = open_all(parquet_store, ParquetFormat(), columns)
    for name in ("id", "name"):
        assert values_of(block, name) == table.column(name).to_pylist()


def test_tiny_row_groups_become_chunks_of_about_chunk_bytes(parquet_store: FolderStore) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": np.arange(10_000)}), row_group_size=10, compression="none")
    _, ((_, index),) = index_all(parquet_store, ParquetFormat(chunk_bytes=8192))
    lengths = [span.length for span in index.chunks]
    assert 4 < len(lengths) < 100
    assert max(lengths) <= 8192
    assert min(lengths[:-1]) > 4096
    assert sum(span.samples for span in index.chunks) == 10_000


def test_one_huge_row_group_is_one_chunk(parquet_store: FolderStore) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": np.random.default_rng(0).random(50_000)}))
    _, ((_, index),) = index_all(parquet_store, ParquetFormat(chunk_bytes=1000))
    assert [span.samples for span in index.chunks] == [50_000]


def test_a_projection_reads_only_the_bytes_of_its_columns(parquet_store: FolderStore) -> None:
    rng = np.random.default_rng(0)
    table = pa.table({f"c{i}": rng.random(20_000) for i in range(12)})
    write(parquet_store, "t.parquet", table, row_group_size=20_000, compression="none", use_dictionary=False)
    wanted = ["c9", "c1", "c2"]
    parquet_store.reads.clear()
    (block,) = open_all(parquet_store, ParquetFormat(), wanted)
    assert list(block.columns) == wanted
    for name in wanted:
        np.testing.assert_array_equal(block.columns[name].values, table[name].to_numpy())
    data = [stop - start for _, start, stop in parquet_store.reads if start < 12 * 160_000 - 70_000]
    assert len(data) == 2  # c1 and c2 lie beside each other
    assert sum(data) < 3 * 161_000


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_gaps_of_any_size_between_wanted_columns_decode(parquet_store: FolderStore, count: int) -> None:
    columns = {}
    for i in range(30):
        width = 1 if i % 2 else 1 << (i // 2)
        columns[f"c{i}"] = pa.array([bytes([i]) * width] * 9, pa.binary())
    write(parquet_store, "t.parquet", pa.table(columns), compression="none", use_dictionary=False, row_group_size=4)
    wanted = [f"c{i}" for i in np.random.default_rng(count).permutation(30)[:count]]
    for block in open_all(parquet_store, ParquetFormat(), wanted):
        for name in wanted:
            assert values_of(block, name) == columns[name].to_pylist()[: block.samples]


def test_a_column_whose_name_begins_with_another_and_a_dot_does_not_mix_with_it(parquet_store: FolderStore) -> None:
    table = pa.table({"a": [1, 2], "z": ["x" * 100_000] * 2, "a.b": [3, 4]})
    write(parquet_store, "t.parquet", table, compression="none")
    (block,) = open_all(parquet_store, ParquetFormat(), ["a"])
    assert {name: values_of(block, name) for name in block.columns} == {"a": [1, 2]}


def test_a_column_with_the_name_of_a_path_into_another_does_not_mix_with_it(parquet_store: FolderStore) -> None:
    table = pa.table({"a.b": [1, 2], "z": ["x" * 100_000] * 2, "a": [{"b": 3}, {"b": 4}]})
    write(parquet_store, "t.parquet", table, compression="none")
    for name in ("a.b", "a"):
        (block,) = open_all(parquet_store, ParquetFormat(), [name])
        assert {column: values_of(block, column) for column in block.columns} == {name: table[name].to_pylist()}


def test_nulls_in_one_shard_give_the_same_columns_in_all(parquet_store: FolderStore) -> None:
    write(parquet_store, "a.parquet", pa.table({"n": pa.array([1, 2], pa.int32()), "f": pa.array([1.0, None])}))
    write(parquet_store, "b.parquet", pa.table({"n": pa.array([None, 4], pa.int32()), "f": pa.array([1.0, 2.0])}))
    first, second = open_all(parquet_store, ParquetFormat())
    assert list(first.columns) == list(second.columns) == ["n", "n__null", "f"]
    assert [block.columns["n"].values.dtype for block in (first, second)] == [np.int32, np.int32]
    assert [values_of(block, "n") for block in (first, second)] == [[1, 2], [0, 4]]
    assert [values_of(block, "n__null") for block in (first, second)] == [[False, False], [True, False]]
    assert np.isnan(first.columns["f"].values[1])


def test_nulls_of_and_in_fixed_size_lists_are_marked_by_place(parquet_store: FolderStore) -> None:
    kind = pa.list_(pa.int16(), 2)
    write(parquet_store, "a.parquet", pa.table({"v": pa.array([[1, 2], None, [3, None]], kind)}))
    write(parquet_store, "b.parquet", pa.table({"v": pa.array([[5, 6]], kind)}))
    first, second = open_all(parquet_store, ParquetFormat())
    assert values_of(first, "v") == [[1, 2], [0, 0], [3, 0]]
    assert values_of(first, "v__null") == [[False, False], [True, True], [False, True]]
    assert values_of(second, "v__null") == [[False, False]]


def test_nulls_are_taken_for_possible_where_the_footer_does_not_count_them(parquet_store: FolderStore) -> None:
    table = pa.table({"n": pa.array([1, 2], pa.int32())})
    write(parquet_store, "a.parquet", table, write_statistics=False)
    (block,) = open_all(parquet_store, ParquetFormat())
    assert list(block.columns) == ["n", "n__null"]


def test_an_image_column_of_bytes_and_path_gives_the_bytes(parquet_store: FolderStore) -> None:
    kind = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    table = pa.table({"image": pa.array([{"bytes": b"\xff\xd8", "path": "a.jpg"}, None], kind), "label": [1, 2]})
    write(parquet_store, "t.parquet", table)
    (block,) = open_all(parquet_store, ParquetFormat())
    assert values_of(block, "image") == [b"\xff\xd8", None]


def test_the_footer_is_read_with_one_request_or_two_when_it_is_long(parquet_store: FolderStore) -> None:
    write(parquet_store, "small.parquet", pa.table({"x": [1]}))
    ParquetFormat().index_shard(parquet_store, ShardTask(parquet_store.head("small.parquet")))
    assert len(parquet_store.reads) == 1
    parquet_store.reads.clear()
    write(parquet_store, "wide.parquet", pa.table({f"column-{i}": [i] for i in range(1500)}))
    index = ParquetFormat().index_shard(parquet_store, ShardTask(parquet_store.head("wide.parquet")))
    assert len(parquet_store.reads) == 2
    assert len(index.schema["columns"]) == 1500


def test_shards_leave_out_hidden_files_and_companions(parquet_store: FolderStore) -> None:
    for key in ("b/2.parquet", "a/1.parquet", "_metadata", "_temporary/0.parquet", "a/.x.parquet", "readme.md"):
        parquet_store.put(key, b"-")
    tasks = ParquetFormat().shards(parquet_store, list(parquet_store.list()))
    assert [task.info.key for task in tasks] == ["a/1.parquet", "b/2.parquet"]


def test_an_empty_table_is_a_shard_without_chunks(parquet_store: FolderStore) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": pa.array([], pa.int32())}))
    _, ((_, index),) = index_all(parquet_store, ParquetFormat())
    assert list(index.chunks) == []


def test_a_shard_without_columns_is_an_error(parquet_store: FolderStore) -> None:
    write(parquet_store, "t.parquet", pa.table({"x": [1]}).select([]))
    with pytest.raises(FormatError, match="has no columns"):
        index_all(parquet_store, ParquetFormat())


def test_shards_of_other_types_or_names_are_refused_naming_both(parquet_store: FolderStore) -> None:
    write(parquet_store, "a.parquet", pa.table({"x": pa.array([1], pa.int32())}))
    write(parquet_store, "b.parquet", pa.table({"x": pa.array([1], pa.int64())}))
    with pytest.raises(FormatError, match=r"b.parquet: column 'x' is int64, but int32 in a.parquet"):
        index_all(parquet_store, ParquetFormat())
    write(parquet_store, "b.parquet", pa.table({"y": pa.array([1], pa.int32())}))
    with pytest.raises(FormatError, match=r"b.parquet: has the columns \['y'\], but a.parquet has \['x'\]"):
        index_all(parquet_store, ParquetFormat())


def test_types_that_differ_only_in_encoding_are_one_data_set(parquet_store: FolderStore) -> None:
    words = pa.array(["a", "b", "a"])
    write(parquet_store, "a.parquet", pa.table({"s": words}))
    write(parquet_store, "b.parquet", pa.table({"s": words.cast(pa.large_string())}))
    write(parquet_store, "c.parquet", pa.table({"s": words.dictionary_encode()}))
    assert [values_of(block, "s") for block in open_all(parquet_store, ParquetFormat())] == [["a", "b", "a"]] * 3


def test_a_column_that_is_not_there_is_an_error_listing_those_that_are(parquet_store: FolderStore) -> None:
    write(parquet_store, "a.parquet", pa.table({"x": [1], "y": [2]}))
    with pytest.raises(ConfigError, match=r"the data set has no \['z'\]; it has \['x', 'y'\]"):
        open_all(parquet_store, ParquetFormat(), ["x", "z"])


def test_a_name_kept_for_nulls_is_refused(parquet_store: FolderStore) -> None:
    write(parquet_store, "a.parquet", pa.table({"x": [1], "x__null": [2]}))
    with pytest.raises(FormatError, match="rename it"):
        index_all(parquet_store, ParquetFormat())


def test_many_threads_open_chunks_at_once(parquet_store: FolderStore) -> None:
    table = mixed_table(4000)
    write(parquet_store, "t.parquet", table, row_group_size=100)
    fmt = ParquetFormat(chunk_bytes=1)
    schema, ((task, index),) = index_all(parquet_store, fmt)
    header = fmt.open_shard(parquet_store, task.info)

    def open_ids(number: int) -> list[int]:
        span = index.chunks[number]
        chunk = ChunkRef(task.info, span.offset, span.length, span.samples, number * 100)
        parts = parquet_store.get_ranges("t.parquet", fmt.chunk_ranges(chunk, header, ["id", "struct"]))
        return fmt.open_chunk(chunk, header, parts, ["id", "struct"], schema).columns["id"].values.tolist()

    with ThreadPoolExecutor(16) as pool:
        found = [i for ids in pool.map(open_ids, range(len(index.chunks))) for i in ids]
    assert found == list(range(4000))


def test_config_makes_an_equal_format() -> None:
    assert ParquetFormat(**ParquetFormat(chunk_bytes=5).config()) == ParquetFormat(chunk_bytes=5)
    with pytest.raises(ConfigError):
        ParquetFormat(chunk_bytes=0)
