"""Suffixes and hidden names: what is detected is read, in any case, and what cannot be read is refused by name."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import struct
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from folder_store import FolderStore, open_all

from penstock.loader import TokensFormat, open_manifest
from penstock.loader.errors import DatasetError, FormatError
from penstock.loader.formats.detect import FORMAT_NAMES, detect_format, make_format
from penstock.loader.formats.mds import MdsFormat
from penstock.loader.formats.shard import find_shards, is_hidden
from penstock.storage import ObjectInfo
from penstock.storage.memory_store import MemoryStore

SUFFIXES = [
    (name, suffix)
    for name in FORMAT_NAMES
    for suffix in make_format(name, {"seq_len": 1} if name == "tokens" else {}).suffixes
]


def test_every_suffix_of_a_format_is_detected_and_read_in_any_case(memory_store: MemoryStore) -> None:
    for name, suffix in SUFFIXES:
        form = make_format(name, {"seq_len": 1} if name == "tokens" else {})
        for key in (f"part.v2{suffix}", f"part.v2{suffix.upper()}"):
            memory_store.put(key, b"x")
            assert [info.key for info in find_shards(list(memory_store.list()), form.suffixes)] == [key]
            if name != "tokens":
                assert detect_format(memory_store, list(memory_store.list())) == form
            memory_store.delete([key])


def test_no_suffix_belongs_to_two_formats() -> None:
    suffixes = [suffix for _, suffix in SUFFIXES]
    assert len(set(suffixes)) == len(suffixes)
    assert all(suffix == suffix.lower() and suffix.startswith(".") for suffix in suffixes)


@pytest.mark.parametrize("key", ["_SUCCESS", ".a.crc", "_temporary/0/a.tar", "x/.cache/a.tar", "x/_a.tar"])
def test_names_with_a_leading_dot_or_underscore_are_hidden(key: str) -> None:
    assert is_hidden(key)
    assert not is_hidden(key.replace("/.", "/").replace("/_", "/").lstrip("._"))


@pytest.mark.parametrize("name", dict.fromkeys(name for name, _ in SUFFIXES))
def test_hidden_shards_are_read_only_when_they_are_named(memory_store: MemoryStore, name: str) -> None:
    form = make_format(name, {"seq_len": 1} if name == "tokens" else {})
    suffix = form.suffixes[0]
    listing = [ObjectInfo(key + suffix, 1) for key in ("a", "_b", "x/.c", "_x/d")]
    assert [info.key for info in find_shards(listing, form.suffixes)] == ["a" + suffix]
    named = [info.key for info in find_shards(listing, form.suffixes, {"_b" + suffix})]
    assert named == ["a" + suffix, "_b" + suffix]


def tar_bytes(key: str) -> bytes:
    sink = io.BytesIO()
    with tarfile.open(fileobj=sink, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(f"{key}.txt"), io.BytesIO())
    return sink.getvalue()


def test_a_hidden_tar_is_left_out_of_a_prefix_and_read_when_it_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes("a"))
    (tmp_path / "_b.tar").write_bytes(tar_bytes("b"))
    assert [info.key for info in open_manifest(tmp_path, progress=False).shards] == ["a.tar"]
    named = open_manifest([tmp_path / "_b.tar", tmp_path / "a.tar"], progress=False, format="tar")
    assert [info.key for info in named.shards] == ["_b.tar", "a.tar"]
    assert [info.key for info in open_manifest(tmp_path / "_b.tar", progress=False).shards] == ["_b.tar"]


@pytest.mark.parametrize("source", [["{}/a/", "{}/_b/"], "{}/{{a,_b}}/", "{}/{{a,_b}}/*.tar", ["{}/a/a.tar", "{}/_*/"]])
def test_a_hidden_folder_that_the_caller_names_is_read_and_what_is_hidden_in_it_is_not(
    tmp_path: Path, source: str | list[str]
) -> None:
    for key in ("a/a.tar", "_b/b.tar", "_b/_c.tar", "_b/.d/e.tar", "a/_f.tar"):
        (tmp_path / key).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / key).write_bytes(tar_bytes("x"))
    parts = [source] if isinstance(source, str) else source
    manifest = open_manifest([part.format(tmp_path) for part in parts], progress=False)
    assert [info.key for info in manifest.shards] == ["a/a.tar", "_b/b.tar"]


def test_a_split_has_the_shards_of_a_hidden_folder_that_the_caller_names(tmp_path: Path) -> None:
    for key in ("a/train.tar", "a/test.tar", "_b/train.tar", "_b/test.tar"):
        (tmp_path / key).parent.mkdir(exist_ok=True)
        (tmp_path / key).write_bytes(tar_bytes("x"))
    manifest = open_manifest([tmp_path / "a", tmp_path / "_b"], split="train", progress=False)
    assert [info.key for info in manifest.shards] == ["a/train.tar", "_b/train.tar"]


def test_a_parquet_file_named_in_capitals_is_read(tmp_path: Path) -> None:
    pq.write_table(pa.table({"x": [1, 2]}), tmp_path / "X.PARQUET")
    assert open_manifest(tmp_path, progress=False).num_samples == 2


@pytest.mark.parametrize("name", ["s.json-lines", "s.JSONL", "s.jsonl.zstd", "s.ndjson.zstd", "s.json-lines.gz"])
def test_json_lines_of_every_name_are_detected_and_read(tmp_path: Path, name: str) -> None:
    data = b'{"a": 1}\n{"a": 2}\n'
    packed = {"zstd": zstandard.compress, "gz": gzip.compress}.get(name.rpartition(".")[2], bytes)(data)
    (tmp_path / name).write_bytes(packed)
    manifest = open_manifest(tmp_path, progress=False)
    assert (manifest.format, manifest.num_samples) == ("jsonl", 2)


def write_megatron(folder: Path, data: str, index: str) -> None:
    tokens = np.arange(100, dtype="<i4")
    (folder / data).write_bytes(tokens.tobytes())
    header = b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, 4, 1, 2)
    body = struct.pack("<iqqq", 100, 0, 0, 1)
    (folder / index).write_bytes(header + body)


@pytest.mark.parametrize(("data", "index"), [("X.BIN", "X.IDX"), ("X.BIN", "X.idx"), ("x.bin", "x.IDX")])
@pytest.mark.parametrize("named", [False, True])
def test_megatron_files_in_capitals_are_read_by_their_index(tmp_path: Path, data: str, index: str, named: bool) -> None:
    write_megatron(tmp_path, data, index)
    source = tmp_path / data if named else tmp_path
    manifest = open_manifest(source, format=TokensFormat(seq_len=10), progress=False)
    assert manifest.schema["columns"]["tokens"]["type"] == "int32"
    assert manifest.num_samples == 10


def write_mds(folder: Path, name: str, compression: str | None) -> None:
    """A shard of two samples of one int column."""
    body = struct.pack("<I", 2) + np.array([100, 108, 116], "<u4").tobytes()
    raw = body.ljust(100, b" ") + struct.pack("<qq", 7, 8)
    if compression in ("br", "snappy"):
        packed = pa.compress(raw, "brotli" if compression == "br" else "snappy", asbytes=True)
    else:
        packed = zstandard.compress(raw) if compression else raw
    (folder / name).write_bytes(packed)
    raw_data = {"basename": "shard.mds" if compression else name, "bytes": len(raw), "hashes": {}}
    entry = {
        "version": 2,
        "format": "mds",
        "compression": compression,
        "hashes": [],
        "size_limit": None,
        "samples": 2,
        "raw_data": raw_data,
        "zip_data": {"basename": name, "bytes": len(packed), "hashes": {}} if compression else None,
        "column_names": ["x"],
        "column_encodings": ["int"],
        "column_sizes": [8],
    }
    (folder / "index.json").write_text(json.dumps({"version": 2, "shards": [entry]}))


@pytest.mark.parametrize(
    ("name", "compression"),
    [
        *[("S.MDS", None), ("s.mds", None), ("s.mds.zst", "zstd"), ("s.mds.zstd", "zstd"), ("S.MDS.ZST", "zstd")],
        *[("s.mds.br", "br"), ("s.mds.snappy", "snappy"), ("S.MDS.SNAPPY", "snappy")],
    ],
)
@pytest.mark.parametrize("named", [False, True])
def test_mds_shards_of_every_name_are_detected_and_read(
    tmp_path: Path, name: str, compression: str | None, named: bool
) -> None:
    write_mds(tmp_path, name, compression)
    manifest = open_manifest(tmp_path / name if named else tmp_path, progress=False)
    assert (manifest.format, manifest.num_samples) == ("mds", 2)
    (block,) = open_all(FolderStore(tmp_path), MdsFormat())
    assert block.columns["x"].values.tolist() == [7, 8]  # type: ignore[union-attr]


def test_mds_in_a_compression_that_is_not_read_is_refused_by_name(tmp_path: Path) -> None:
    write_mds(tmp_path, "s.mds.lz4", "lz4")
    (tmp_path / "a.mds").write_bytes(b"")
    with pytest.raises(FormatError, match=r"s\.mds\.lz4: is compressed as 'lz4'; write it with zstd, .*br, snappy"):
        open_manifest(tmp_path, progress=False)


@pytest.mark.parametrize(("name", "compression"), [("s.mds.br", "br"), ("s.mds.snappy", "snappy")])
@pytest.mark.parametrize("damage", ["cut", "longer", "noise"])
def test_damaged_mds_shards_of_brotli_and_snappy_are_format_errors(
    tmp_path: Path, name: str, compression: str, damage: str
) -> None:
    write_mds(tmp_path, name, compression)
    data = (tmp_path / name).read_bytes()
    bad = {"cut": data[:-3], "longer": b"\xff\xff\xff\xff\x0f" + data[1:], "noise": bytes(range(200, 250))}[damage]
    (tmp_path / name).write_bytes(bad)
    index = json.loads((tmp_path / "index.json").read_text())
    index["shards"][0]["zip_data"]["bytes"] = len(bad)
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(FormatError, match=name):
        open_all(FolderStore(tmp_path), MdsFormat())


def test_an_mds_index_in_a_hidden_folder_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "_old").mkdir()
    write_mds(tmp_path, "s.mds", None)
    write_mds(tmp_path / "_old", "s.mds", None)
    assert open_manifest(tmp_path, progress=False).num_samples == 2


def test_a_named_object_of_another_suffix_is_still_refused(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(tar_bytes("a"))
    (tmp_path / "b.txt").write_bytes(b"x")
    with pytest.raises(DatasetError, match=r"b\.txt: not a shard of format 'tar' by its name"):
        open_manifest([tmp_path / "a.tar", tmp_path / "b.txt"], progress=False)


LINES = b'{"a": 1}\n{"a": 2}\n'


@pytest.mark.parametrize("codec", ["", ".gz", ".bz2", ".zst"])
@pytest.mark.parametrize("source", ["{}", "{}/", "{}/*.json{}", "{}/x.json{}", ["{}/x.json{}", "{}/y.json{}"]])
def test_lines_in_files_named_json_are_read_where_the_format_is_given(
    tmp_path: Path, codec: str, source: str | list[str]
) -> None:
    packed = {".zst": zstandard.compress, ".gz": gzip.compress, ".bz2": bz2.compress, "": bytes}[codec](LINES)
    for name in ("x", "y"):
        (tmp_path / f"{name}.json{codec}").write_bytes(packed)
    places = [place.format(tmp_path, codec) for place in ([source] if isinstance(source, str) else source)]
    manifest = open_manifest(places, format="jsonl", progress=False)
    assert manifest.num_samples == (2 if "/x.json" in places[0] and len(places) == 1 else 4)
    with pytest.raises(DatasetError, match=r"holds no shards.*If each line.*format='jsonl' \(--format jsonl\)"):
        open_manifest(tmp_path, progress=False)


@pytest.mark.parametrize("name", ["x.jsonl", "part-0000"])
def test_files_named_json_beside_lines_by_name_or_without_an_ending_are_no_shards(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(LINES)
    (tmp_path / "schema.json").write_text("[\n]")
    for form in (None, "jsonl"):
        assert open_manifest(tmp_path, format=form, progress=False).num_samples == 2


def test_an_object_of_any_name_is_read_where_it_and_the_format_are_named(tmp_path: Path) -> None:
    (tmp_path / "x.ldjson").write_bytes(LINES)
    assert open_manifest(tmp_path / "x.ldjson", format="jsonl", progress=False).num_samples == 2
    (tmp_path / "y.jsonl").write_bytes(LINES)
    with pytest.raises(DatasetError, match=r"x\.ldjson: not a shard of format 'jsonl' by its name"):
        open_manifest([tmp_path / "x.ldjson", tmp_path / "y.jsonl"], progress=False)


@pytest.mark.parametrize("source", ["{}", "{}/*", "{}/part-*"])
def test_hidden_files_are_left_out_among_shards_without_an_ending(tmp_path: Path, source: str) -> None:
    (tmp_path / "part-00000").write_bytes(LINES)
    (tmp_path / "_SUCCESS").touch()
    (tmp_path / ".part-00000").write_bytes(LINES)
    assert open_manifest(source.format(tmp_path), progress=False).num_samples == 2


@pytest.mark.parametrize(
    ("name", "codec", "ending"),
    [
        *((name, "bz2", "bz2") for name in ("x.tar", "x.jsonl")),
        *((name, "gzip", "gz") for name in ("x.tar", "x.jsonl", "part-0000")),
        *((name, "zstd", "zst") for name in ("x.tar", "x.jsonl", "part-0000")),
    ],
)
def test_a_compressed_shard_whose_name_does_not_say_so_is_refused_with_the_name_it_needs(
    tmp_path: Path, name: str, codec: str, ending: str
) -> None:
    data = tar_bytes("x") if name == "x.tar" else LINES
    (tmp_path / name).write_bytes({"gzip": gzip.compress, "bz2": bz2.compress, "zstd": zstandard.compress}[codec](data))
    with pytest.raises(FormatError, match=rf"{name} at byte 0: is compressed with {codec}.*end in \.{ending}"):
        open_manifest(tmp_path, progress=False)
