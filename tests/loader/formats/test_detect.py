from __future__ import annotations

import gzip
import io
import tarfile

import pytest

from penstock.loader.errors import ConfigError, DatasetError
from penstock.loader.formats.detect import detect_format, make_format, sniff_format
from penstock.storage.memory_store import MemoryStore


def detect(store: MemoryStore) -> str:
    return detect_format(store, list(store.list())).name


def tar_bytes() -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("a.txt"), io.BytesIO())
    return sink.getvalue()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("tar", "a.tar"),
        ("tar", "x/a.TAR"),
        ("tar", "a.tar.gz"),
        ("tar", "a.tar.zst"),
        ("tar", "a.tbz2"),
        ("parquet", "a.parquet"),
        ("arrow", "a.arrow"),
        ("jsonl", "a.jsonl"),
        ("jsonl", "a.jsonl.zst"),
        ("jsonl", "a.jsonl.bz2"),
        ("mds", "shard.00000.mds"),
    ],
)
def test_names_tell_the_format(memory_store: MemoryStore, name: str, key: str) -> None:
    memory_store.put(key, b"x")
    memory_store.put("README.md", b"about")
    memory_store.put("_SUCCESS", b"")
    assert detect(memory_store) == name


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"PAR1....", "parquet"),
        (b"ARROW1\0\0", "arrow"),
        (tar_bytes(), "tar"),
        (gzip.compress(tar_bytes(), mtime=0), "tar"),
        (b'\n{"a": 1}\n', "jsonl"),
        (gzip.compress(b'{"a": 1}\n', mtime=0), "jsonl"),
        (b"\x1f\x8b broken", None),
        (b"plain text", None),
        (b"", None),
    ],
)
def test_first_bytes_tell_the_format_of_a_nameless_file(head: bytes, name: str | None) -> None:
    assert sniff_format(head) == name


def test_a_nameless_shard_is_opened_to_see_what_it_is(memory_store: MemoryStore) -> None:
    memory_store.put("part-00000", b"PAR1....")
    assert detect(memory_store) == "parquet"


def test_mixed_formats_are_refused_with_two_names_of_each(memory_store: MemoryStore) -> None:
    for key in ("a.tar", "b.tar", "c.tar", "a.parquet", "b.parquet"):
        memory_store.put(key, b"x")
    with pytest.raises(DatasetError, match=r"parquet: a\.parquet, b\.parquet; tar: a\.tar, b\.tar\).*format="):
        detect(memory_store)


@pytest.mark.parametrize("keys", [("a.bin",), ("a.bin", "a.idx"), ("a.u16",)])
def test_token_files_need_a_length_and_the_error_says_how_to_give_it(
    memory_store: MemoryStore, keys: tuple[str, ...]
) -> None:
    for key in keys:
        memory_store.put(key, b"xx")
    with pytest.raises(ConfigError, match=r"TokensFormat\(seq_len=2048\), or --seq-len 2048"):
        detect(memory_store)


def test_loose_files_are_no_data_set_and_the_error_points_to_pack(memory_store: MemoryStore) -> None:
    memory_store.put("cat/1.jpg", b"x")
    with pytest.raises(DatasetError, match=r"cat/1\.jpg.*penstock pack"):
        detect(memory_store)


def test_an_index_json_of_another_library_is_named(memory_store: MemoryStore) -> None:
    memory_store.put("index.json", b"{}")
    with pytest.raises(DatasetError, match=r"index\.json but no \.mds"):
        detect(memory_store)


def test_a_format_is_made_again_from_its_own_config() -> None:
    tokens = make_format("tokens", {"seq_len": 128, "dtype": "uint32"})
    assert make_format(tokens.name, tokens.config()) == tokens


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("zip", {}, "none of tar, parquet"),
        ("tokens", {}, "seq_len"),
        ("parquet", {"colour": "red"}, "cannot be configured with"),
    ],
)
def test_unknown_formats_and_settings_are_refused(name: str, config: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_format(name, config)
