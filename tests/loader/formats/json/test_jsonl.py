"""JsonlFormat: every line as Python's json reads it, types that hold for the data set, clear words on bad lines."""

from __future__ import annotations

import bz2
import gzip
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from folder_store import FolderStore, open_all, rows_of
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from line_files import GOOD, index, read, same, write

from penstock import DistributedDataLoader, Mixture, Source, pack
from penstock.loader.columns import ArrayColumn, ObjectColumn
from penstock.loader.errors import ConfigError, FormatError
from penstock.loader.formats.json import lines as json_lines
from penstock.loader.formats.json.jsonl import JsonColumn, JsonlFormat
from penstock.loader.formats.json.lines import find_lines, infer_columns, read_columns
from penstock.loader.formats.json.types import infer_type, merge_types

ROWS = [
    {"id": i, "text": f"grün {i}", "x": i / 2, "ok": i % 2 == 0, "tags": ["a"] * i, "of": {"b": i}} for i in range(50)
]


@pytest.mark.parametrize("chunk_bytes", [1, 100, 1000, 1 << 20])
def test_rows_come_as_they_were_written_whatever_the_chunks(tmp_path: Path, chunk_bytes: int) -> None:
    write(tmp_path, ROWS)
    assert read(tmp_path, chunk_bytes) == ROWS


def test_chunks_are_whole_lines_that_follow_each_other(tmp_path: Path) -> None:
    data = write(tmp_path, ROWS)
    spans = index(tmp_path, data, chunk_bytes=1000).chunks
    assert len(spans) > 3
    assert sum(span.samples for span in spans) == 50
    assert all(span.length <= 1000 for span in spans)
    offset = 0
    for span in spans:
        assert span.offset == offset
        offset += span.length
        assert data[offset - 1 : offset] == b"\n"
    assert offset == len(data)


@pytest.mark.parametrize("name", ["s.jsonl.gz", "s.ndjson.zst", "s.json-lines.gz"])
def test_compressed_shards_are_one_chunk_of_the_same_rows(tmp_path: Path, name: str) -> None:
    data = write(tmp_path, ROWS, "plain")
    packed = gzip.compress(data) if name.endswith("gz") else zstandard.compress(data)
    [span] = index(tmp_path, packed, name).chunks
    assert (span.offset, span.length, span.samples, span.memory) == (0, len(packed), 50, len(data))
    assert read(tmp_path) == ROWS


def test_streams_that_were_joined_are_read_on(tmp_path: Path) -> None:
    halves = [b"".join(json.dumps(row).encode() + b"\n" for row in rows) for rows in (ROWS[:20], ROWS[20:])]
    for codec, compress in (("gz", gzip.compress), ("bz2", bz2.compress), ("zst", zstandard.compress)):
        (tmp_path / f"s.jsonl.{codec}").write_bytes(b"".join(map(compress, halves)))
    assert read(tmp_path) == ROWS * 3


def test_blank_lines_crlf_a_byte_order_mark_and_a_last_line_without_end_are_fine(tmp_path: Path) -> None:
    data = b'\xef\xbb\xbf{"a":1}\r\n\r\n \t\n\n  {"a":2}\n{"a":3}'
    (tmp_path / "s.jsonl").write_bytes(data)
    (tmp_path / "t.jsonl.gz").write_bytes(gzip.compress(data))
    for chunk_bytes in (1, 1 << 20):
        assert read(tmp_path, chunk_bytes) == [{"a": 1}, {"a": 2}, {"a": 3}] * 2


def test_a_shard_of_blank_lines_has_no_chunks_and_no_say_in_the_schema(tmp_path: Path) -> None:
    empty = index(tmp_path, b"\n \n")
    assert empty.chunks == []
    known = index(tmp_path, b'{"a":1}\n').schema
    assert JsonlFormat().merge_schema(known, empty.schema, "s") == known
    assert JsonlFormat().merge_schema(empty.schema, known, "s") == known


def test_columns_have_the_kinds_that_batches_need(tmp_path: Path) -> None:
    write(tmp_path, ROWS)
    [block] = open_all(FolderStore(tmp_path), JsonlFormat())
    dtypes = {name: c.values.dtype for name, c in block.columns.items() if isinstance(c, ArrayColumn)}
    assert dtypes == {"id": np.int64, "x": np.float64, "ok": np.bool_}
    assert {name for name, c in block.columns.items() if isinstance(c, ObjectColumn)} == {"text", "tags", "of"}
    assert block.nbytes > 0


def test_nulls_are_marked_in_every_chunk_though_one_shard_alone_has_them(tmp_path: Path) -> None:
    write(tmp_path, [{"i": 1, "b": True, "f": 1.5, "s": "x"}], "a.jsonl")
    write(tmp_path, [{"i": None, "b": None, "f": None, "s": None}, {}], "b.jsonl")
    first, second = open_all(FolderStore(tmp_path), JsonlFormat())
    assert list(first.columns) == list(second.columns) == ["i", "i__null", "b", "b__null", "f", "s"]
    assert rows_of(first) == [{"i": 1, "i__null": False, "b": True, "b__null": False, "f": 1.5, "s": "x"}]
    row = rows_of(second)[0]
    assert math.isnan(row.pop("f"))
    assert row == {"i": 0, "i__null": True, "b": False, "b__null": True, "s": None}
    assert {c.values.dtype.name for c in second.columns.values() if isinstance(c, ArrayColumn)} == {
        "int64",
        "bool",
        "float64",
    }


def test_a_column_that_some_lines_lack_has_nulls_there(tmp_path: Path) -> None:
    write(tmp_path, [{"a": 1}, {"b": 2}])
    for chunk_bytes in (1, 1 << 20):
        assert read(tmp_path, chunk_bytes) == [
            {"a": 1, "a__null": False, "b": 0, "b__null": True},
            {"a": 0, "a__null": True, "b": 2, "b__null": False},
        ]


def test_integers_become_floats_everywhere_when_one_shard_has_a_fraction(tmp_path: Path) -> None:
    write(tmp_path, [{"x": 1}], "a.jsonl")
    write(tmp_path, [{"x": 0.5}], "b.jsonl")
    blocks = open_all(FolderStore(tmp_path), JsonlFormat())
    assert [c.values.dtype for block in blocks for c in block.columns.values() if isinstance(c, ArrayColumn)] == [
        np.float64,
        np.float64,
    ]


def test_values_that_contradict_each_other_stay_python_objects(tmp_path: Path) -> None:
    rows = [
        {"v": 1, "n": 1},
        {"v": "one", "n": 2},
        {"v": [1, "x", None], "n": 3},
        {"v": {"a": {}}, "n": 4},
        {"v": None, "n": 5},
    ]
    write(tmp_path, rows[:1], "a.jsonl")
    write(tmp_path, rows[1:], "b.jsonl")
    blocks = open_all(FolderStore(tmp_path), JsonlFormat())
    assert [row for block in blocks for row in rows_of(block)] == rows
    assert all(isinstance(block.columns["v"], JsonColumn) for block in blocks)


def test_strings_that_look_like_times_stay_strings(tmp_path: Path) -> None:
    rows = [{"t": "2020-01-01", "deep": [{"t": "2020-01-01T00:00:00"}]}]
    write(tmp_path, rows)
    assert read(tmp_path) == rows


@pytest.mark.parametrize("before", [b'{"m": 1}', b'{"m": 1}\n{"m": "a"}'], ids=["one type", "mixed types"])
@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"f": 1e400}', "Number too big"),
        (b'{"f": [{"g": -1e400}]}', "Number too big"),
        (b'{"m": 1e400}', "Number too big"),
        (b'{"f": %s.5}' % (b"9" * 400), "Number too big"),
        (b'{"f": [{"g": -%s.0}]}' % (b"9" * 400), "Number too big"),
        (b'{"m": %s.5}' % (b"9" * 400), "Number too big"),
        (b'{"a": 1, "a": 2}', "the key 'a' comes twice"),
        (b'{"m": {"a": 1, "a": 2}}', "the key 'a' comes twice"),
        (b'{"m": 1, "m": "b"}', "the key 'm' comes twice"),
        (b'{"\\ud800": 1}', "surrogates not allowed"),
        (b'{"s": "\\ud800"}', "surrogate"),
    ],
)
def test_lines_that_arrow_refuses_are_refused_with_their_number_though_python_reads_them(
    tmp_path: Path, before: bytes, line: bytes, words: str
) -> None:
    with pytest.raises(FormatError, match=words) as caught:
        index(tmp_path, b"\n" + before + b"\n\n" + line + b"\n" + GOOD)
    place = len(before) + 3
    assert caught.value.offset == place
    assert f" line {before.count(10) + 4} cannot be read" in str(caught.value)
    assert "correct or remove the line" in str(caught.value)


def test_line_numbers_count_from_the_shards_first_line_in_every_chunk(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"^s\.jsonl at byte 900: line 101 is not JSON"):
        index(tmp_path, GOOD * 100 + b"{oops\n", chunk_bytes=50)
    with pytest.raises(FormatError, match=r"^s\.jsonl\.gz at byte 900: line 101 is not JSON"):
        index(tmp_path, gzip.compress(GOOD * 100 + b"{oops\n"), "s.jsonl.gz", chunk_bytes=50)


def test_integers_beyond_int64_that_are_written_as_floats_are_floats_and_beyond_float64_stay_exact(
    tmp_path: Path,
) -> None:
    as_javascript_writes, power, huge = 123456789012345680000, 1 << 70, 10**400
    rows = [{"f": 3, "p": -1, "h": 1}, {"f": as_javascript_writes, "p": power, "h": -huge}]
    write(tmp_path, [*rows, {"f": None, "p": None, "h": None}])
    got = read(tmp_path)
    assert [row["f"] for row in got[:2]] == [3.0, float(as_javascript_writes)]
    assert [row["p"] for row in got[:2]] == [-1.0, float(power)]
    assert [row["h"] for row in got] == [1, -huge, None]


ODD, LOW = (1 << 53) + 1, -(1 << 63)
HASHES = [(1 << 63) + 1, (1 << 64) - 1]


@pytest.mark.parametrize(
    ("numbers", "kind"),
    [
        ([*HASHES, 0, 1 << 63], "uint"),
        ([*HASHES, (1 << 62) + 1], "uint"),
        ([*HASHES, -1], "any"),
        ([HASHES[0], 1 << 64], "any"),
        ([1 << 63, 10**19, 3], "float"),  # which float64 gives back, and which always were floats
        ([1 << 63, -3], "float"),
        ([ODD, LOW, (1 << 63) - 1], "int"),
        ([ODD, 0.5], "any"),
        ([ODD, 1e20], "any"),
        ([1 << 53, -(1 << 53), 0.5], "float"),
        ([1 << 60, 0.5], "float"),
        ([HASHES[0], 0.5], "any"),
        ([LOW - 1, 1], "any"),
    ],
)
@pytest.mark.parametrize("layout", ["one chunk", "chunks", "shards", "shards backwards"])
@pytest.mark.parametrize("place", ["column", "list", "object"])
def test_no_integer_loses_a_bit_wherever_it_stands(
    tmp_path: Path, numbers: list[int | float], kind: str, layout: str, place: str
) -> None:
    wrap: dict[str, Any] = {"column": lambda n: n, "list": lambda n: [[n], None], "object": lambda n: {"m": {"id": n}}}
    rows = [{"row": row, "n": wrap[place](number)} for row, number in enumerate(numbers)]
    if "shards" in layout:
        for name, row in enumerate(rows[::-1] if "backwards" in layout else rows):
            write(tmp_path, [row], f"{name}.jsonl")
    else:
        write(tmp_path, rows)
    got = {row["row"]: row["n"] for row in read(tmp_path, chunk_bytes=1 if layout == "chunks" else 9999)}
    assert got == {row["row"]: row["n"] for row in rows}  # Python compares integers with floats exactly
    types = {type(value) for value in got.values()} if place == "column" else set()
    assert types <= {int, float}
    with DistributedDataLoader(str(tmp_path), batch_size=9, shuffle=False, last_batch="partial") as loader:
        batch = next(iter(loader))
    if place == "column":
        dtype = {"uint": torch.uint64, "int": torch.int64, "float": torch.float64, "any": None}[kind]
        assert getattr(batch["n"], "dtype", None) == dtype
    order = batch["row"].tolist()
    values = batch["n"].tolist() if isinstance(batch["n"], torch.Tensor) else batch["n"]
    assert dict(zip(order, values, strict=True)) == {row["row"]: row["n"] for row in rows}


def test_hashes_of_64_bits_with_nulls_are_uint64_and_marked(tmp_path: Path) -> None:
    write(tmp_path, [{"hash": HASHES[0]}, {"hash": None}, {}, {"hash": HASHES[1]}])
    with DistributedDataLoader(str(tmp_path), batch_size=4, shuffle=False) as loader:
        batch = next(iter(loader))
    assert batch["hash"].dtype == torch.uint64
    assert batch["hash"].tolist() == [HASHES[0], 0, 0, HASHES[1]]
    assert batch["hash__null"].tolist() == [False, True, True, False]


def test_hashes_of_64_bits_are_packed_and_mixed_as_they_are(tmp_path: Path) -> None:
    write(tmp_path, [{"hash": value} for value in [*HASHES, 1]])
    for form in ("parquet", "jsonl", "arrow"):
        pack(str(tmp_path / "s.jsonl"), str(tmp_path / form), format=form, progress=False)
        with DistributedDataLoader(str(tmp_path / form), batch_size=3, shuffle=False) as loader:
            assert next(iter(loader))["hash"].tolist() == [*HASHES, 1], form
    mixture = Mixture({name: Source(str(tmp_path / name)) for name in ("jsonl", "parquet")})
    with DistributedDataLoader(mixture, batch_size=6, shuffle=False) as loader:
        assert sorted(next(iter(loader))["hash"].tolist()) == sorted([*HASHES, 1] * 2)


def test_infinity_and_nan_by_name_are_read(tmp_path: Path) -> None:
    (tmp_path / "s.jsonl").write_bytes(b'{"f": Infinity}\n{"f": 1}\n{"f": -Infinity}\n')
    assert [row["f"] for row in read(tmp_path)] == [math.inf, 1.0, -math.inf]


def test_only_chosen_columns_come(tmp_path: Path) -> None:
    write(tmp_path, [{"a": 1, "b": "x", "c": None}, {"a": 2, "b": "y", "c": 5}])
    assert read(tmp_path, columns=["c", "b"]) == [
        {"c": 0, "c__null": True, "b": "x"},
        {"c": 5, "c__null": False, "b": "y"},
    ]


def test_an_unknown_column_is_refused_with_the_ones_there_are(tmp_path: Path) -> None:
    write(tmp_path, [{"a": 1, "b": 2}])
    with pytest.raises(ConfigError, match=r"no \['z'\]; it has \['a', 'b'\]"):
        read(tmp_path, columns=["z"])


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 63) - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5)
)


def nested_values(min_keys: int) -> st.SearchStrategy[Any]:
    def deeper(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
        keys = st.text("ab", max_size=1)
        return st.lists(inner, max_size=3) | st.dictionaries(keys, inner, min_size=min_keys, max_size=2)

    return st.recursive(scalars, deeper)


values = nested_values(min_keys=0)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.dictionaries(st.sampled_from("xyz"), values, max_size=3), min_size=1, max_size=8),
    st.sampled_from([1, 40, 9999]),
)
def test_any_rows_read_as_python_reads_them(tmp_path: Path, rows: list[dict[str, Any]], chunk_bytes: int) -> None:
    write(tmp_path, rows)
    got = read(tmp_path, chunk_bytes)
    names = {name for row in rows for name in row}
    assert len(got) == len(rows)
    for ours, row in zip(got, rows, strict=True):
        assert {name.removesuffix("__null") for name in ours} == names
        for name in names:
            value = None if ours.get(name + "__null") else ours[name]
            assert same(value, row.get(name)), (value, row.get(name))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(values, max_size=4).map(lambda some: [infer_type(value) for value in some])))
def test_the_order_of_shards_does_not_change_types(groups: list[list[Any]]) -> None:
    flat = [kind for group in groups for kind in group]
    forward: Any = "null"
    backward: Any = "null"
    for kind in flat:
        forward = merge_types(forward, kind)
    for kind in reversed(flat):
        backward = merge_types(backward, kind)
    assert forward == backward


@given(st.lists(st.sampled_from([b"x", b" ", b"\r", b"\n", b"\t"])).map(b"".join))
def test_lines_are_found_as_splitting_finds_them(data: bytes) -> None:
    lines = find_lines(memoryview(data), "s")
    assert [lines[index] for index in range(len(lines))] == [line for line in data.split(b"\n") if line.strip()]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("xyz"), nested_values(min_keys=1), max_size=3), min_size=1, max_size=8))
def test_types_are_the_same_with_arrow_and_line_by_line(rows: list[dict[str, Any]]) -> None:
    lines = find_lines(memoryview(b"".join(json.dumps(row).encode() + b"\n" for row in rows)), "s")
    assert infer_columns(lines) == infer_columns(lines, mixed=True)


def test_columns_of_a_large_chunk_are_read_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = find_lines(
        memoryview(b"".join(b'{"i": %d, "s": "%d", "m": %s}\n' % (i, i, b'"x"' if i % 2 else b"1") for i in range(50))),
        "s",
    )
    types, _ = infer_columns(lines)
    whole = read_columns(lines, types)
    monkeypatch.setattr(json_lines, "SLICE_BYTES", 100)
    assert read_columns(lines, types) == whole
    assert whole["i"].to_pylist() == list(range(50))
