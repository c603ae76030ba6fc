from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from decimal import Decimal
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from folder_store import FolderStore, index_all, open_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from penstock.loader.columns import ArrayColumn, BytesColumn
from penstock.loader.errors import ConfigError, DatasetError, DecodeError, FormatError
from penstock.loader.formats.mds import MdsFormat
from penstock.loader.formats.mds_encodings import EncodedColumn, gather


@cache
def streaming() -> ModuleType:
    """The library that defines MDS, without its ready-made data sets, which import many others."""
    for unused in ("multimodal", "text", "vision"):
        sys.modules.setdefault(f"streaming.{unused}", ModuleType(f"streaming.{unused}"))
    library: ModuleType = pytest.importorskip("streaming", reason="install penstock[test] for what defines MDS")
    return library


COLUMNS = {
    "a_bytes": "bytes",
    "b_str": "str",
    "c_int": "int",
    "d_u16": "uint16",
    "e_f16": "float16",
    "f_f64": "float64",
    "g_any": "ndarray",
    "h_dtype": "ndarray:int16",
    "i_fixed": "ndarray:float32:2,3",
    "j_json": "json",
    "k_int": "str_int",
    "l_float": "str_float",
    "m_decimal": "str_decimal",
    "n_png": "png",
    "o_i8": "int8",
}


@pytest.fixture
def mds_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def sample(i: int) -> dict[str, object]:
    rng = np.random.default_rng(i)
    return {
        "a_bytes": rng.bytes(i % 50),
        "b_str": "ä" * (i % 7),
        "c_int": i - 5,
        "d_u16": np.uint16(i * 7),
        "e_f16": np.float16(i / 4),
        "f_f64": np.float64(i / 3),
        "g_any": rng.integers(0, 9, (1 + i % 3, 2)).astype(["uint8", "float32", "int64"][i % 3]),
        "h_dtype": rng.integers(0, 9, (1 + i % 300,)).astype("int16"),
        "i_fixed": rng.random((2, 3), dtype=np.float32),
        "j_json": {"i": i, "list": [None, i]},
        "k_int": 10**30 + i,
        "l_float": i / 7,
        "m_decimal": Decimal(i) / 8,
        "n_png": Image.new("RGB", (2, 2), (i % 256, 0, 0)),
        "o_i8": np.int8(i % 100),
    }


def write(root: Path, samples: range, columns: dict[str, str] = COLUMNS, **options: object) -> None:
    with streaming().MDSWriter(out=str(root), columns=columns, **options) as writer:
        for i in samples:
            writer.write({name: value for name, value in sample(i).items() if name in columns})


def read_reference(root: Path) -> list[dict[str, object]]:
    """The samples as mosaicml-streaming reads them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # it leaves the index open
        return list(streaming().LocalDataset(str(root)))


def read(store: FolderStore, fmt: MdsFormat, columns: list[str] | None = None) -> list[dict[str, object]]:
    samples = []
    for block in open_all(store, fmt, columns):
        rows = np.arange(block.samples)
        taken = {
            name: list(column.values) if isinstance(column, ArrayColumn) else column.take(rows)
            for name, column in block.columns.items()
        }
        samples += [{name: values[i] for name, values in taken.items()} for i in rows]
    return samples


def check(got: list[dict[str, object]], want: list[dict[str, object]]) -> None:
    assert len(got) == len(want)
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if isinstance(value, Image.Image):
                assert ours[name].startswith(b"\x89PNG")
            elif isinstance(value, np.ndarray):
                np.testing.assert_array_equal(ours[name], value, strict=True)
            else:
                assert ours[name] == value, name


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [1, 3000, 1 << 22])
def test_raw_shards_read_as_streaming_reads_them(mds_store: FolderStore, chunk_bytes: int) -> None:
    write(mds_store.root, range(60), size_limit=10_000)
    blocks = open_all(mds_store, MdsFormat(chunk_bytes))
    check(read(mds_store, MdsFormat(chunk_bytes)), read_reference(mds_store.root))
    kinds = {name: type(column) for name, column in blocks[0].columns.items()}
    fixed = {"c_int", "d_u16", "e_f16", "f_f64", "i_fixed", "o_i8"}
    assert {name for name, kind in kinds.items() if kind is ArrayColumn} == fixed
    assert {name for name, kind in kinds.items() if kind is BytesColumn} == {"a_bytes", "b_str", "n_png"}
    assert all(block.columns["i_fixed"].values.shape == (block.samples, 2, 3) for block in blocks)
    if chunk_bytes == 1:
        assert {block.samples for block in blocks} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compression", "keep_raw"),
    [("zstd", False), ("zstd:7", True), ("gz", False), ("bz2", False), ("br", False), ("snappy", True)],
)
def test_compressed_shards_read_as_streaming_reads_them(
    mds_store: FolderStore, tmp_path_factory: pytest.TempPathFactory, compression: str | None, keep_raw: bool
) -> None:
    plain = tmp_path_factory.mktemp("plain")
    write(plain, range(40), size_limit=8000)
    write(mds_store.root, range(40), size_limit=8000, compression=compression, hashes=["sha1"])
    if keep_raw:
        for path in plain.glob("*.mds"):
            (mds_store.root / path.name).write_bytes(path.read_bytes())
    tasks = MdsFormat().shards(mds_store, list(mds_store.list()))
    assert all(not task.info.key.endswith(".mds") for task in tasks)
    check(read(mds_store, MdsFormat()), read_reference(plain))


@pytest.mark.slow
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    columns=st.sets(st.sampled_from(sorted(set(COLUMNS) - {"n_png"})), min_size=1),
    count=st.integers(1, 20),
    chunk_bytes=st.integers(1, 4000),
    data=st.data(),
)
def test_any_columns_of_any_shards_read_as_they_were_written(
    tmp_path_factory: pytest.TempPathFactory, columns: set[str], count: int, chunk_bytes: int, data: st.DataObject
) -> None:
    store = FolderStore(tmp_path_factory.mktemp("mds"))
    write(store.root, range(count), {name: COLUMNS[name] for name in columns}, size_limit=5000)
    wanted = data.draw(st.lists(st.sampled_from(sorted(columns)), unique=True))
    got = read(store, MdsFormat(chunk_bytes), wanted)
    check(got, [{name: sample(i)[name] for name in wanted} for i in range(count)])


@pytest.mark.slow
def test_folders_with_an_index_each_are_one_data_set(mds_store: FolderStore) -> None:
    write(mds_store.root / "b", range(5), size_limit=3000)
    write(mds_store.root / "a", range(5, 9))
    merged = json.loads((mds_store.root / "b" / "index.json").read_text())
    for shard in merged["shards"]:
        shard["raw_data"]["basename"] = "b/" + shard["raw_data"]["basename"]
    mds_store.put("index.json", json.dumps(merged).encode())
    got = [item["c_int"] for item in read(mds_store, MdsFormat())]
    assert got == [i - 5 for i in range(9)]  # the outer index first; the inner ones add what it lacks


def test_a_large_raw_shard_is_cut_into_chunks_read_by_two_ranges(mds_store: FolderStore) -> None:
    write(mds_store.root, range(300), {"a_bytes": "bytes", "c_int": "int"})
    fmt = MdsFormat(chunk_bytes=1000)
    _, ((_, index),) = index_all(mds_store, fmt)
    assert all(span.length <= 1000 for span in index.chunks)
    assert len(index.chunks) < 20
    check(read(mds_store, fmt), read_reference(mds_store.root))


def test_columns_of_one_size_are_gathered_whatever_their_alignment() -> None:
    data = np.random.default_rng(0).integers(0, 256, 997, dtype=np.uint8)
    for starts in ([3, 10, 500], [5, 16, 27, 38], [0], [], [900, 2, 2]):
        got = gather(memoryview(data), np.array(starts, np.int64), np.dtype("<u4"), (2,))
        want = [np.frombuffer(data[start : start + 8].tobytes(), "<u4") for start in starts]
        np.testing.assert_array_equal(got, np.reshape(want, (len(starts), 2)))


def test_a_pickled_column_is_refused_unless_it_is_left_out(mds_store: FolderStore) -> None:
    with streaming().MDSWriter(out=str(mds_store.root), columns={"x": "int", "y": "pkl"}) as writer:
        writer.write({"x": 1, "y": {"a": 1}})
    with pytest.raises(ConfigError, match=r"'y'.*is never unpickled.*columns="):
        open_all(mds_store, MdsFormat())
    assert read(mds_store, MdsFormat(), ["x"]) == [{"x": 1}]


def test_an_unknown_column_of_mds_is_an_error(mds_store: FolderStore) -> None:
    write(mds_store.root, range(2), {"c_int": "int"})
    with pytest.raises(ConfigError, match="c_int"):
        open_all(mds_store, MdsFormat(), ["d"])


def test_a_value_that_cannot_be_decoded_is_our_error() -> None:
    import pyarrow as pa

    column = EncodedColumn(pa.array([b"{"], pa.large_binary()), "json", json.loads)
    with pytest.raises(DecodeError, match="json"):
        column.take(np.array([0]))


def test_shards_without_an_index_are_an_error(mds_store: FolderStore) -> None:
    write(mds_store.root, range(3))
    (mds_store.root / "index.json").unlink()
    with pytest.raises(DatasetError, match=r"no index\.json"):
        MdsFormat().shards(mds_store, list(mds_store.list()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: [], "is not an MDS index"),
        (lambda index: {**index, "version": 1}, "version 1"),
        (lambda index: {"version": 2, "shards": [{}]}, "damaged"),
        (lambda index: {**index, "shards": [{**index["shards"][0], "format": "csv"}]}, "'csv'"),
        (lambda index: {**index, "shards": [{**index["shards"][0], "column_sizes": [4]}]}, "take"),
        (lambda index: {**index, "shards": [{**index["shards"][0], "samples": 7}]}, "7 in index.json"),
    ],
)
def test_an_index_that_does_not_fit_is_an_error(
    mds_store: FolderStore, change: Callable[[Any], Any], message: str
) -> None:
    write(mds_store.root, range(3), {"c_int": "int"})
    index = json.loads((mds_store.root / "index.json").read_text())
    mds_store.put("index.json", json.dumps(change(index)).encode())
    with pytest.raises(FormatError, match=message):
        open_all(mds_store, MdsFormat())


def test_a_shard_of_another_size_or_that_is_missing_is_an_error(mds_store: FolderStore) -> None:
    write(mds_store.root, range(3))
    shard = mds_store.root / "shard.00000.mds"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(FormatError, match="copy it again"):
        index_all(mds_store, MdsFormat())
    shard.unlink()
    with pytest.raises(FormatError, match="no such object"):
        index_all(mds_store, MdsFormat())


def test_shards_with_other_columns_are_refused(mds_store: FolderStore) -> None:
    write(mds_store.root / "a", range(3), {"c_int": "int"})
    write(mds_store.root / "b", range(3), {"d_u16": "uint16"})
    with pytest.raises(FormatError, match="c_int"):
        index_all(mds_store, MdsFormat())


@pytest.mark.slow
@pytest.mark.parametrize("chunk_bytes", [500, 1 << 22])
def test_damaged_shards_never_escape_as_a_foreign_error(mds_store: FolderStore, chunk_bytes: int) -> None:
    write(mds_store.root, range(30), {name: COLUMNS[name] for name in ("a_bytes", "b_str", "d_u16", "i_fixed")})
    shard = mds_store.root / "shard.00000.mds"
    whole = shard.read_bytes()
    rng = np.random.default_rng(0)
    refused = 0
    for at in rng.integers(0, len(whole), 200):
        shard.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
        try:
            open_all(mds_store, MdsFormat(chunk_bytes))
        except FormatError as exc:
            refused += exc.shard == "shard.00000.mds"
    assert refused > 20


def test_a_damaged_compressed_shard_is_an_error(mds_store: FolderStore) -> None:
    write(mds_store.root, range(3), compression="zstd")
    shard = mds_store.root / "shard.00000.mds.zstd"
    shard.write_bytes(b"\x00" * shard.stat().st_size)
    with pytest.raises(FormatError, match="is not a zstd stream"):
        open_all(mds_store, MdsFormat())


def test_config_makes_an_equal_mds_format() -> None:
    assert MdsFormat(**MdsFormat(chunk_bytes=7).config()) == MdsFormat(chunk_bytes=7)
    with pytest.raises(ConfigError):
        MdsFormat(chunk_bytes=0)
