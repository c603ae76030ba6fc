"""Lines that are refused: damaged, too deep or no objects, each with its shard and number."""

from __future__ import annotations

import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest
import zstandard
from folder_store import FolderStore, open_all
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from line_files import GOOD, index, read, same, write

from penstock.loader.errors import FormatError
from penstock.loader.formats.json import lines as json_lines
from penstock.loader.formats.json.jsonl import JsonlFormat
from penstock.loader.formats.shard import ChunkRef, ShardTask

BAD = {
    "no bytes": (b"", 0, "no bytes"),
    "no JSON": (GOOD + b"{oops\n" + GOOD, 9, "'{oops'"),
    "a cut last line": (GOOD + b'{"a": 1, "te', 9, "not JSON"),
    "an array": (GOOD + GOOD + b"[1]\n", 18, "a JSON list, not an object"),
    "a number": (b"1\n", 0, "a JSON int, not an object"),
    "two objects on one line": (GOOD + b'{"a":1}{"a":2}\n', 9, "Extra data"),
    "an object over two lines": (GOOD + b'{"a":\n1}\n', 9, "not JSON"),
    "no UTF-8": (GOOD + b'{"a": "\xff"}\n', 9, "not UTF-8"),
    "bottomless": (GOOD + b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}\n", 9, "nests more than 100 deep"),
    "binary": (bytes(range(128, 256)) * 50, 0, "not UTF-8"),
    "a clash with the nulls": (b'{"a": null, "a__null": 1}\n{"a": 1}\n', None, "reserved for the nulls of 'a'"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_lines_are_errors_that_name_shard_and_offset(tmp_path: Path, case: str) -> None:
    data, offset, words = BAD[case]
    with pytest.raises(FormatError) as caught:
        index(tmp_path, data)
    assert words in str(caught.value)
    assert (caught.value.shard, caught.value.offset) == ("s.jsonl", offset)


@pytest.mark.parametrize("change", [b'{"a": "text"}\n', b'{"a": null}\n', GOOD * 2, b"{oops\n", b"\n"])
def test_a_shard_that_changed_after_the_index_is_an_error(tmp_path: Path, change: bytes) -> None:
    (tmp_path / "s.jsonl").write_bytes(GOOD)
    store = FolderStore(tmp_path)
    form = JsonlFormat()
    schema = form.index_shard(store, ShardTask(store.head("s.jsonl"))).schema
    ref = ChunkRef(store.head("s.jsonl"), 0, len(change), 1, 0)
    with pytest.raises(FormatError, match=r"^s\.jsonl at byte 0: "):
        form.open_chunk(ref, None, [memoryview(change)], None, schema)


@pytest.mark.parametrize("name", ["s.jsonl.gz", "s.jsonl.bz2", "s.jsonl.zst"])
def test_damaged_compressed_shards_are_errors(tmp_path: Path, name: str) -> None:
    data = json.dumps({"a": os.urandom(3000).hex()}).encode() + b"\n"
    packed = {"gz": gzip.compress, "bz2": bz2.compress, "zst": zstandard.compress}[name.rpartition(".")[2]](data)
    for damaged in (b"", data, packed[:-20]):
        with pytest.raises(FormatError, match=name):
            index(tmp_path, damaged, name)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


def test_brackets_in_text_do_not_make_a_line_deep(tmp_path: Path) -> None:
    rows = [{"t": "[{" * 500 + '"\\', "d": [[1]]}, {"t": '\\"' + "{[" * 500, "d": nested(99)}]
    write(tmp_path, rows)
    assert read(tmp_path) == rows


def test_lines_that_nest_deeper_than_100_are_refused(tmp_path: Path) -> None:
    write(tmp_path, [{"d": nested(99)}, {"d": nested(100)}])
    with pytest.raises(FormatError, match=r"line 2 nests more than 100 deep.*store the deep value as text"):
        read(tmp_path)


@pytest.mark.parametrize("flat", [b'{"d":[]}\n', b"7\n"])
@pytest.mark.parametrize("deep_at", [0, 300, 599])
def test_one_deep_line_among_many_flat_ones_is_named(tmp_path: Path, flat: bytes, deep_at: int) -> None:
    lines = [flat] * 600
    lines[deep_at] = json.dumps({"d": nested(100)}).encode() + b"\n"
    with pytest.raises(FormatError, match=rf"line {deep_at + 1} nests more than 100 deep"):
        index(tmp_path, b"".join(lines))


@pytest.mark.slow
def test_maps_with_keys_of_their_own_in_each_row_cost_no_more_than_their_text(tmp_path: Path) -> None:
    rows = [{"id": i, "counts": {f"key{i}": i}} for i in range(6000)]
    write(tmp_path, rows)
    assert read(tmp_path) == rows


def test_rows_that_are_maps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_lines, "COLUMNS", 100)
    with pytest.raises(FormatError, match="maps, not records"):
        index(tmp_path, b"".join(b'{"key%d": 1}\n' % i for i in range(101)))


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.tuples(st.integers(0, 200), st.binary(max_size=2)), min_size=1, max_size=3), st.sampled_from([1, 9999])
)
def test_random_damage_gives_a_format_error_or_what_python_reads(
    tmp_path: Path, splices: list[tuple[int, bytes]], chunk_bytes: int
) -> None:
    damaged = bytearray(b'{"a": 1, "b": "x", "c": [1.5, null], "d": {"e": true}}\n' * 4)
    for at, new in splices:
        damaged[at : at + 1] = new
    data = bytes(damaged)
    try:
        (tmp_path / "s.jsonl").write_bytes(data)
        got = read(tmp_path, chunk_bytes)
    except FormatError:
        return
    rows = [json.loads(line) for line in data.split(b"\n") if line.strip()]
    assert len(got) == len(rows)
    for ours, row in zip(got, rows, strict=True):
        assert all(same(None if ours.get(f"{name}__null") else ours[name], value) for name, value in row.items())


@pytest.mark.parametrize("text", [b"null", b"null\nnull\n", b'{"a": 1}\n null\n{"a": 2}\n', b'{"a": 1}\nnull null\n'])
def test_a_line_that_holds_no_object_is_refused_also_where_arrow_takes_it_for_one(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.jsonl").write_bytes(text)
    with pytest.raises(FormatError, match=r"line \d is (a JSON NoneType, not an object|not JSON)"):
        open_all(FolderStore(tmp_path), JsonlFormat())
