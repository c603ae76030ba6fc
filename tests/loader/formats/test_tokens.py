from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_store import FolderStore, index_all, open_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import open_manifest, pack
from penstock.loader import ShardFormat, TokenDocumentsFormat
from penstock.loader.errors import ConfigError, FormatError
from penstock.loader.formats.shard import ShardTask
from penstock.loader.formats.tokens import TokensFormat

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


@pytest.fixture
def token_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def write_megatron(store: FolderStore, name: str, documents: list[np.ndarray], dtype: str) -> np.ndarray:
    """The layout that Megatron's indexed data sets document: one sequence a document."""
    lengths = np.array([len(document) for document in documents], np.int32)
    pointers = np.concatenate([[0], np.cumsum(lengths[:-1], dtype=np.int64)]) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(documents), len(documents) + 1)
    index += lengths.tobytes() + pointers.astype(np.int64).tobytes()
    index += np.arange(len(documents) + 1, dtype=np.int64).tobytes()
    tokens = np.concatenate(documents).astype(dtype)
    store.put(f"{name}.bin", tokens.tobytes())
    store.put(f"{name}.idx", index)
    return tokens


def cut(tokens: np.ndarray, seq_len: int, overlap: int) -> np.ndarray:
    stride = seq_len - overlap
    rows = [tokens[i : i + seq_len] for i in range(0, len(tokens) - seq_len + 1, stride)]
    return np.stack(rows)


def read(store: FolderStore, fmt: TokensFormat) -> np.ndarray:
    return np.concatenate([block.columns["tokens"].values for block in open_all(store, fmt)])


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(20, 400), min_size=1, max_size=3),
    seq_len=st.integers(1, 20),
    data=st.data(),
    dtype=st.sampled_from(["uint16", "uint32", "int64", "uint8"]),
    chunk_bytes=st.integers(1, 500),
)
def test_samples_are_the_slices_of_a_memmap(
    tmp_path: Path, sizes: list[int], seq_len: int, data: st.DataObject, dtype: str, chunk_bytes: int
) -> None:
    overlap = data.draw(st.integers(0, seq_len - 1))
    store = FolderStore(tmp_path)
    want = []
    for path in tmp_path.iterdir():
        path.unlink()
    for i, size in enumerate(sizes):
        np.random.default_rng(i).integers(0, 127, size).astype(dtype).tofile(tmp_path / f"{i}.bin")
        want.append(cut(np.memmap(tmp_path / f"{i}.bin", dtype, "r"), seq_len, overlap))
    got = read(store, TokensFormat(seq_len, dtype, overlap, chunk_bytes))
    np.testing.assert_array_equal(got, np.concatenate(want))
    assert got.dtype == dtype


def test_chunks_hold_whole_samples_and_about_chunk_bytes(token_store: FolderStore) -> None:
    token_store.put("a.tokens", np.arange(10_000, dtype=np.uint16).tobytes())
    _, ((_, index),) = index_all(token_store, TokensFormat(64, overlap=1, chunk_bytes=1024))
    assert all(span.length <= 1024 and span.length > 800 for span in list(index.chunks)[:-1])
    assert sum(span.samples for span in index.chunks) == (10_000 - 64) // 63 + 1


def test_indexing_raw_files_reads_nothing(token_store: FolderStore) -> None:
    token_store.put("a.bin", bytes(1000))
    index_all(token_store, TokensFormat(10))
    assert token_store.reads == []


def test_values_are_views_of_the_chunk(token_store: FolderStore) -> None:
    token_store.put("a.bin", bytes(1000))
    (block,) = open_all(token_store, TokensFormat(10, overlap=3))
    values = block.columns["tokens"].values
    assert not values.flags.owndata
    assert not values.flags.writeable
    assert values.strides == (14, 2)


def test_suffixes_name_their_dtype(token_store: FolderStore) -> None:
    token_store.put("a.u32", np.arange(100, dtype="<u4").tobytes())
    got = read(token_store, TokensFormat(10, dtype="uint16"))
    np.testing.assert_array_equal(got.ravel(), np.arange(100))
    assert got.dtype == np.uint32


@pytest.mark.parametrize("dtype", list(MEGATRON_CODES))
def test_megatron_files_are_read_by_the_dtype_of_their_index(token_store: FolderStore, dtype: str) -> None:
    rng = np.random.default_rng(0)
    documents = [rng.integers(0, 120, n) for n in (5, 17, 1, 300)]
    tokens = write_megatron(token_store, "corpus_text_document", documents, dtype)
    np.testing.assert_array_equal(read(token_store, TokensFormat(16, overlap=1)), cut(tokens, 16, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda index: b"XX" + index[2:], "starts with"),
        (lambda index: index[:9] + struct.pack("<Q", 2) + index[17:], "version 2"),
        (lambda index: index[:17] + b"\x07" + index[18:], "float32"),
        (lambda index: index[:17] + b"\x63" + index[18:], "unknown"),
        (lambda index: index[:18] + struct.pack("<Q", 1 << 40) + index[26:], "take"),
        (lambda index: index[:-8], "take"),
        (lambda index: index[:20], "too few"),
        (lambda index: index[:17] + b"\x04" + index[18:], "do not belong together"),
    ],
)
def test_a_megatron_index_that_does_not_fit_is_an_error(
    token_store: FolderStore, damage: Callable[[bytes], bytes], message: str
) -> None:
    write_megatron(token_store, "c", [np.arange(50), np.arange(30)], "uint16")
    token_store.put("c.idx", damage((token_store.root / "c.idx").read_bytes()))
    with pytest.raises(FormatError, match=message):
        index_all(token_store, TokensFormat(8))


@pytest.mark.parametrize(
    ("size", "message"),
    [(0, "holds no bytes"), (101, "not a whole number of uint16"), (18, "do not fill one sequence")],
)
def test_a_file_of_a_wrong_size_is_an_error_that_names_it(token_store: FolderStore, size: int, message: str) -> None:
    token_store.put("odd.bin", bytes(size))
    with pytest.raises(FormatError, match=message) as caught:
        TokensFormat(10).index_shard(token_store, ShardTask(token_store.head("odd.bin")))
    assert caught.value.shard == "odd.bin"


def test_shards_of_two_dtypes_are_refused(token_store: FolderStore) -> None:
    token_store.put("a.u16", bytes(100))
    token_store.put("b.u32", bytes(100))
    with pytest.raises(FormatError, match=r"uint32.*uint16.*a\.u16"):
        index_all(token_store, TokensFormat(5))


@pytest.mark.parametrize(
    "arguments",
    [
        {"seq_len": 0},
        {"seq_len": -1},
        {"seq_len": 4, "overlap": 4},
        {"seq_len": 4, "overlap": -1},
        {"seq_len": 4, "dtype": "float32"},
        {"seq_len": 4, "chunk_bytes": 0},
        {"seq_len": 4, "chunk_bytes": 2.5},
        {"seq_len": 4, "chunk_bytes": "4MiB"},
        {"seq_len": 2.5},
        {"seq_len": "4"},
        {"seq_len": True},
        {"seq_len": 4, "overlap": 1.0},
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        TokensFormat(**arguments)


def test_config_makes_an_equal_tokens_format() -> None:
    fmt = TokensFormat(128, "int32", 1)
    assert TokensFormat(**fmt.config()) == fmt


def test_an_unknown_column_of_tokens_is_an_error(token_store: FolderStore) -> None:
    token_store.put("a.bin", bytes(100))
    with pytest.raises(ConfigError, match="tokens"):
        open_all(token_store, TokensFormat(10), ["labels"])


@pytest.fixture
def packed_uint32(tmp_path: Path) -> Path:
    """A packed data set of 32-bit tokens, whose names do not tell their type: the manifest beside them does."""
    pack([np.arange(70_000, 70_100)], tmp_path / "out", format="tokens", seq_len=10, dtype="uint32", progress=False)
    return tmp_path / "out"


@pytest.mark.parametrize("form", [TokensFormat(20), TokensFormat(10), TokenDocumentsFormat(eos=9)])
@pytest.mark.parametrize("shard", ["", "shard-000000.bin"])
def test_packed_tokens_are_not_read_as_another_type(packed_uint32: Path, form: ShardFormat, shard: str) -> None:
    with pytest.raises(ConfigError, match=r"are uint32, .* be read as uint16: give dtype='uint32'.* index --rebuild"):
        open_manifest(packed_uint32 / shard, format=form, progress=False)


def test_packed_tokens_are_read_with_the_type_and_any_length(packed_uint32: Path) -> None:
    assert open_manifest(packed_uint32, format=TokensFormat(20, dtype="uint32"), progress=False).num_samples == 5
    rebuilt = open_manifest(packed_uint32, format=TokensFormat(20), progress=False, rebuild=True)
    assert rebuilt.schema["columns"]["tokens"]["type"] == "uint16"


def test_packed_tokens_that_were_written_anew_since_are_read_as_asked(packed_uint32: Path) -> None:
    np.arange(60, dtype="<u2").tofile(packed_uint32 / "shard-000000.bin")
    assert open_manifest(packed_uint32, format=TokensFormat(20), progress=False).num_samples == 3
