from __future__ import annotations

import struct
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folder_store import FolderStore, index_all, open_all, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import DistributedDataLoader
from penstock.loader.errors import ConfigError, DatasetError, FormatError
from penstock.loader.formats.detect import make_format
from penstock.loader.formats.shard import ChunkRef
from penstock.loader.formats.token_documents import TokenDocumentsFormat
from penstock.storage import ObjectInfo, open_store

CODES = {"uint16": 8, "int32": 4}
Documents = list[list[int]]


@pytest.fixture
def token_store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path)


def write_megatron(store: FolderStore, sequences: Documents, firsts: list[int], dtype: str = "uint16") -> None:
    """Sequences, and the first sequence of each document with the number of sequences at the end, as Megatron does."""
    lengths = np.array([len(one) for one in sequences], np.int64)
    pointers = (np.cumsum(lengths) - lengths) * np.dtype(dtype).itemsize
    index = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, CODES[dtype], len(sequences), len(firsts))
    index += lengths.astype("<i4").tobytes() + pointers.astype("<i8").tobytes() + np.array(firsts, "<i8").tobytes()
    store.put("a.bin", np.array([token for one in sequences for token in one], dtype).tobytes())
    store.put("a.idx", index)


def read(store: FolderStore, fmt: TokenDocumentsFormat) -> Documents:
    found: Any = [row["tokens"] for block in open_all(store, fmt) for row in rows_of(block)]
    return found


HYPOTHESIS = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
documents_of = st.lists(st.lists(st.integers(0, 3), max_size=12), min_size=1, max_size=12)


@HYPOTHESIS
@given(sequences=documents_of, data=st.data(), chunk_bytes=st.integers(1, 60), dtype=st.sampled_from(sorted(CODES)))
def test_documents_of_megatron_are_those_of_its_index(
    tmp_path: Path, sequences: Documents, data: st.DataObject, chunk_bytes: int, dtype: str
) -> None:
    sequences.append([1])
    cuts = data.draw(st.lists(st.integers(1, len(sequences)), unique=True).map(sorted))
    firsts = [0, *cuts] if cuts[-1:] == [len(sequences)] else [0, *cuts, len(sequences)]
    store = FolderStore(tmp_path)
    write_megatron(store, sequences, firsts, dtype)
    expected = [[token for one in sequences[low:high] for token in one] for low, high in pairwise(firsts)]
    assert read(store, TokenDocumentsFormat(chunk_bytes=chunk_bytes)) == expected


@pytest.mark.parametrize(
    ("firsts", "covered"),
    [([0, 1, 2], "0 to 2 of 5"), ([0], "0 to 0 of 5"), ([], "0 to 0 of 5"), ([2, 3, 5], "2 to 5 of 5")],
)
def test_a_megatron_index_whose_documents_leave_out_sequences_is_refused_by_name(
    tmp_path: Path, firsts: list[int], covered: str
) -> None:
    write_megatron(FolderStore(tmp_path), [[1, 2], [3], [4, 5, 6], [7], [8, 9]], firsts)
    with pytest.raises(FormatError, match=rf"^a\.idx: its documents are sequences {covered}.*eos="):
        DistributedDataLoader(str(tmp_path), batch_size=1, format="token_documents")
    assert read(FolderStore(tmp_path), TokenDocumentsFormat(eos=9)) == [list(range(1, 10))]  # which needs no index


@pytest.mark.parametrize("firsts", [[0, 1, 2], [1, 2, 3], [1, 2]])
def test_ends_that_a_megatron_index_leaves_out_are_read_where_they_join_nothing(
    tmp_path: Path, firsts: list[int]
) -> None:
    write_megatron(FolderStore(tmp_path), [[1, 2], [3], [4, 5, 6]], firsts)
    assert read(FolderStore(tmp_path), TokenDocumentsFormat()) == [[1, 2], [3], [4, 5, 6]]


@HYPOTHESIS
@given(documents=documents_of, ends_open=st.booleans(), chunk_bytes=st.integers(1, 60))
def test_documents_of_a_raw_file_end_with_their_last_token(
    tmp_path: Path, documents: Documents, ends_open: bool, chunk_bytes: int
) -> None:
    expected = [[*one, 9] for one in documents] + ([[1, 2]] if ends_open else [])
    store = FolderStore(tmp_path)
    store.put("a.u16", np.array([token for one in expected for token in one], "<u2").tobytes())
    assert read(store, TokenDocumentsFormat(eos=9, chunk_bytes=chunk_bytes)) == expected


def test_chunks_are_about_as_long_as_asked(token_store: FolderStore) -> None:
    token_store.put("a.bin", np.array([1, 1, 1, 0] * 50 + [1] * 60 + [0], "<u2").tobytes())
    _, [(_, index)] = index_all(token_store, TokenDocumentsFormat(eos=0, chunk_bytes=40))
    assert [chunk.length for chunk in index.chunks] == [40] * 10 + [122]


def test_a_raw_file_without_the_token_that_ends_documents_is_refused(token_store: FolderStore) -> None:
    token_store.put("a.bin", b"\x01\x00")
    with pytest.raises(FormatError, match=r"a.bin: has no .idx .*TokenDocumentsFormat\(eos=2\)"):
        index_all(token_store, TokenDocumentsFormat())


@pytest.mark.parametrize(("name", "eos"), [("a.bin", 128_009), ("a.u16", 1 << 16), ("a.u32", 1 << 32)])
def test_a_last_token_that_the_type_cannot_hold_is_refused(token_store: FolderStore, name: str, eos: int) -> None:
    token_store.put(name, bytes(8))
    with pytest.raises(
        FormatError, match=rf"{name}: is read as uint\d+, of which no token is eos={eos}; give its dtype"
    ):
        index_all(token_store, TokenDocumentsFormat(eos=eos))


def test_half_a_token_is_refused(token_store: FolderStore) -> None:
    token_store.put("a.u32", b"\x01\x00\x00\x00\x01")
    with pytest.raises(FormatError, match=r"a.u32 at byte 4: its 5 bytes are not a whole number of uint32"):
        index_all(token_store, TokenDocumentsFormat(eos=0))


@pytest.mark.parametrize(
    ("firsts", "says"), [([0, 3, 1, 2], "do not lie one behind another"), ([0, 9], "do not lie one behind another")]
)
def test_an_index_whose_documents_do_not_follow_each_other_is_refused(
    token_store: FolderStore, firsts: list[int], says: str
) -> None:
    write_megatron(token_store, [[1], [2], [3]], firsts)
    with pytest.raises(FormatError, match=f"a.idx: its documents {says}"):
        index_all(token_store, TokenDocumentsFormat())


def test_an_index_that_changed_is_refused(token_store: FolderStore) -> None:
    fmt = TokenDocumentsFormat()
    write_megatron(token_store, [[1, 2], [3]], [0, 1, 2])
    schema, [(task, index)] = index_all(token_store, fmt)
    write_megatron(token_store, [[1], [2, 3], []], [0, 1, 3])
    blocks = open_all(token_store, fmt)
    assert [row["tokens"] for block in blocks for row in rows_of(block)] == [[1], [2, 3]]
    write_megatron(token_store, [[1, 2, 3]], [0, 1])
    with pytest.raises(FormatError, match=r"index (it|the data set) again"):
        open_indexed(token_store, fmt, schema, task, index)


def test_an_index_that_is_gone_is_named(tmp_path: Path) -> None:
    write_megatron(FolderStore(tmp_path), [[1, 2], [3]], [0, 1, 2])
    (tmp_path / "a.idx").unlink()
    with pytest.raises(DatasetError, match=r"a.bin: its .idx is gone"):
        TokenDocumentsFormat().open_shard(open_store(str(tmp_path)), ObjectInfo("a.bin", 6))


def open_indexed(store: FolderStore, fmt: TokenDocumentsFormat, schema: Any, task: Any, index: Any) -> None:
    for span in index.chunks:
        ref = ChunkRef(task.info, span.offset, span.length, span.samples, 0)
        header = fmt.open_shard(store, task.info)
        fmt.open_chunk(ref, header, store.get_ranges("a.bin", fmt.chunk_ranges(ref, header, None)), None, schema)


@pytest.mark.parametrize(
    ("config", "says"),
    [({"eos": -1}, "eos=-1"), ({"eos": True}, "eos=True"), ({"dtype": "float32"}, "dtype='float32'")],
)
def test_settings_that_cannot_work_are_refused(config: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make_format("token_documents", config)
