from __future__ import annotations

import datetime
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.loader.columns import ArrayColumn, BytesColumn, ObjectColumn
from penstock.loader.errors import FormatError
from penstock.loader.formats.arrow.blocks import typed_kind
from penstock.loader.formats.arrow.columns import describe_type, marks_nulls, to_columns, value_bytes

INTEGERS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
TEMPORALS = [
    pa.timestamp("s"),
    pa.timestamp("ns", tz="Europe/Berlin"),
    pa.date32(),
    pa.date64(),
    pa.time32("ms"),
    pa.time64("us"),
    pa.duration("ms"),
]
TEXTS = [pa.string(), pa.large_string(), pa.string_view()]
BINARIES = [pa.binary(), pa.large_binary(), pa.binary_view(), pa.binary(3)]
SCALARS = [*INTEGERS, *FLOATS, pa.bool_()]
FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
TENSOR = pa.fixed_shape_tensor(pa.float32(), [2, 3])
OBJECTS = [
    pa.list_(pa.int32()),
    pa.large_list(pa.string()),
    pa.struct({"a": pa.int8(), "b": pa.list_(pa.string())}),
    pa.map_(pa.string(), pa.int64()),
    pa.decimal128(9, 2),
    pa.null(),
]


def values_for(kind: pa.DataType, with_nulls: bool = True) -> st.SearchStrategy[object]:
    if pa.types.is_dictionary(kind):
        return values_for(kind.value_type)
    if pa.types.is_boolean(kind):
        return st.booleans()
    if kind in INTEGERS:
        low, high = (
            (0, 1 << kind.bit_width) if str(kind)[0] == "u" else (-1 << kind.bit_width - 1, 1 << kind.bit_width - 1)
        )
        return st.integers(low, high - 1)
    if kind in FLOATS:
        return st.floats(width=kind.bit_width, allow_nan=False)
    if kind == pa.date64():
        return st.integers(-1000, 1000).map(lambda day: day * 86_400_000)
    if pa.types.is_time(kind):
        return st.integers(0, 86_399_000)
    if kind in TEMPORALS:
        return st.integers(-(1 << 31), (1 << 31) - 1)
    if kind in TEXTS:
        return st.text(max_size=5)
    if pa.types.is_fixed_size_binary(kind):
        return st.binary(min_size=3, max_size=3)
    if kind in BINARIES:
        return st.binary(max_size=20)
    if kind == FILE:
        return st.builds(
            lambda data, path: {"bytes": data, "path": None if data is None else path},
            st.none() | st.binary(max_size=5),
            st.none() | st.text(max_size=3),
        )
    if pa.types.is_fixed_size_list(kind):
        inner = nullable(kind.value_type) if with_nulls else values_for(kind.value_type, with_nulls)
        return st.lists(inner, min_size=kind.list_size, max_size=kind.list_size)
    if pa.types.is_decimal(kind):
        return st.decimals(-1000, 1000, places=2)
    if pa.types.is_map(kind):
        return st.lists(st.tuples(st.text(max_size=2), st.integers(0, 9)), max_size=2)
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({"a": st.integers(0, 9), "b": st.lists(st.text(max_size=2), max_size=2)})
    if pa.types.is_null(kind):
        return st.none()
    inner = st.text(max_size=3) if kind.value_type == pa.string() else st.integers(-5, 5)
    return st.lists(inner, max_size=3)


def nullable(kind: pa.DataType) -> st.SearchStrategy[object]:
    return st.one_of(values_for(kind), values_for(kind), st.none())


KINDS = [
    *SCALARS,
    *TEMPORALS,
    *TEXTS,
    *BINARIES,
    *OBJECTS,
    FILE,
    pa.list_(pa.float32(), 3),
    pa.list_(pa.bool_(), 2),
    pa.list_(pa.list_(pa.int16(), 2), 2),
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.int64()),
]


@st.composite
def arrays(draw: st.DrawFn) -> tuple[pa.ChunkedArray, bool]:
    """A chunked array of slices of any type, and whether nulls were allowed in it."""
    kind = draw(st.sampled_from(KINDS))
    with_nulls = draw(st.booleans())
    chunks = []
    for _ in range(draw(st.integers(0, 3))):
        values = draw(st.lists(nullable(kind) if with_nulls else values_for(kind, with_nulls), max_size=12))
        array = pa.array(values, kind)
        start = draw(st.integers(0, len(values)))
        chunks.append(array.slice(start, draw(st.integers(0, len(values) - start))))
    return pa.chunked_array(chunks, kind), with_nulls


def storage(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_dictionary(kind) else kind


def plain(array: pa.ChunkedArray) -> list[object]:
    """What to_pylist gives, with numbers for moments and the bytes of files."""
    kind = storage(array.type)
    if kind in TEMPORALS:
        number = pa.int32() if kind.bit_width == 32 else pa.int64()
        return [v for chunk in array.chunks for v in chunk.view(number).to_pylist()]
    values = array.to_pylist()
    return [v and v["bytes"] for v in values] if kind == FILE else values


def same(got: object, missing: object, want: object) -> bool:
    """Whether a cell, or nested list of cells, of an array and of its null marks is what Arrow says."""
    if isinstance(got, list):
        wants = [None] * len(got) if want is None else want
        return all(same(g, m, w) for g, m, w in zip(got, missing, wants, strict=True))
    if want is None:
        return math.isnan(got) if isinstance(got, float) else (missing is True and got == 0)
    return missing is False and got == want


@pytest.mark.slow
@settings(deadline=None, max_examples=600)
@given(arrays())
def test_columns_say_what_to_pylist_says(drawn: tuple[pa.ChunkedArray, bool]) -> None:
    array, with_nulls = drawn
    columns = to_columns("x", array, nulls=with_nulls or not marks_nulls(array.type), shard="s")
    want = plain(array)
    column = columns["x"]
    if isinstance(column, ArrayColumn):
        marks = columns.get("x__null")
        missing = marks.values.tolist() if marks else np.zeros(column.values.shape, bool).tolist()
        assert same(column.values.tolist(), missing, want)
        assert column.values.shape[0] == len(array)
    else:
        assert column.take(np.arange(len(array))) == want
        assert list(columns) == ["x"]


@settings(deadline=None, max_examples=200)
@given(arrays())
def test_kind_dtype_and_names_do_not_depend_on_the_values(drawn: tuple[pa.ChunkedArray, bool]) -> None:
    array, with_nulls = drawn
    empty = to_columns("x", array.slice(0, 0), nulls=with_nulls, shard="s")
    full = to_columns("x", array, nulls=with_nulls or not marks_nulls(array.type), shard="s")
    assert list(empty) == list(full)
    for name, column in full.items():
        assert type(column) is type(empty[name])
        if isinstance(column, ArrayColumn):
            assert column.values.dtype == empty[name].values.dtype
            assert column.values.shape[1:] == empty[name].values.shape[1:]


@pytest.mark.parametrize("kind", [*SCALARS, *TEMPORALS], ids=str)
def test_nulls_make_a_second_column_where_values_cannot_say_so(kind: pa.DataType) -> None:
    columns = to_columns("x", pa.array([None, None], kind), nulls=True, shard="s")
    assert list(columns) == (["x"] if kind in FLOATS else ["x", "x__null"])
    if kind in TEMPORALS:
        assert columns["x"].values.dtype == np.int64


def test_numbers_text_and_tensors_without_nulls_share_memory_with_arrow() -> None:
    numbers = pa.array(np.arange(100, dtype=np.int32)).slice(7, 50)
    column = to_columns("x", numbers, nulls=False, shard="s")["x"]
    assert column.values.ctypes.data == numbers.buffers()[1].address + 28
    text = pa.array(["ab", "cde"])
    assert (
        np.frombuffer(to_columns("x", text, nulls=True, shard="s")["x"].buffer, np.uint8).ctypes.data
        == text.buffers()[2].address
    )


def test_fixed_shape_tensors_keep_their_shape() -> None:
    tensor = pa.FixedShapeTensorArray.from_numpy_ndarray(np.arange(24, dtype=np.float32).reshape(4, 2, 3))
    column = to_columns("x", pa.chunked_array([tensor.slice(1)]), nulls=True, shard="s")["x"]
    np.testing.assert_array_equal(column.values, np.arange(6, 24, dtype=np.float32).reshape(3, 2, 3))
    assert describe_type(tensor.type) == "float32[2, 3]"
    assert value_bytes(tensor.type) == 24


def test_nulls_that_the_index_did_not_announce_are_an_error() -> None:
    with pytest.raises(FormatError, match=r"s: column 'x' holds nulls.*index the data set again"):
        to_columns("x", pa.array([1, None]), nulls=False, shard="s")


def test_floats_hold_nan_for_null_whatever_was_announced() -> None:
    column = to_columns("x", pa.array([1.5, None], pa.float16()), nulls=False, shard="s")["x"]
    assert column.values.dtype == np.float16
    np.testing.assert_array_equal(column.values, [1.5, np.nan])


def test_dates_count_days_and_timestamps_their_unit() -> None:
    days = to_columns("x", pa.array([datetime.date(1970, 1, 11)]), nulls=False, shard="s")["x"]
    seconds = to_columns("x", pa.array([datetime.datetime(1970, 1, 2)], pa.timestamp("s")), nulls=False, shard="s")["x"]
    assert (days.values.tolist(), seconds.values.tolist()) == ([10], [86_400])


def test_strings_in_several_chunks_are_one_column() -> None:
    array = pa.chunked_array([["a", None], [], ["bc"]], pa.string())
    column = to_columns("x", array, nulls=True, shard="s")["x"]
    assert isinstance(column, BytesColumn)
    assert column.take(np.array([2, 1, 0])) == ["bc", None, "a"]
    empty = to_columns("x", pa.chunked_array([], pa.binary()), nulls=True, shard="s")["x"]
    assert empty.take(np.arange(0)) == []


def test_everything_else_stays_an_arrow_array_until_it_is_taken() -> None:
    column = to_columns("x", pa.array([[1], None, [2, 3]]), nulls=True, shard="s")["x"]
    assert isinstance(column, ObjectColumn)
    assert column.take(np.array([2, 1])) == [[2, 3], None]


def test_dictionaries_inside_of_fixed_size_lists_give_their_values() -> None:
    words = pa.DictionaryArray.from_arrays(pa.array([1, 0, None, 1]), pa.array([70, 80]))
    columns = to_columns("x", pa.FixedSizeListArray.from_arrays(words, 2), nulls=True, shard="s")
    assert columns["x"].values.tolist() == [[80, 70], [0, 80]]
    assert columns["x__null"].values.tolist() == [[False, False], [True, False]]


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.list_(pa.string_view()), [["a"], [], None]),
        (pa.large_list(pa.binary_view()), [[b"a", None], None]),
        (pa.list_(pa.string_view(), 2), [["a", "b"], None]),
        (pa.struct([("a", pa.list_(pa.string_view()))]), [{"a": ["x"]}, None]),
        (pa.map_(pa.string(), pa.string_view()), [[("k", "v")], None]),
    ],
    ids=str,
)
def test_views_inside_of_other_values_are_taken(kind: pa.DataType, values: list[Any]) -> None:
    column = to_columns("x", pa.array(values, kind), nulls=True, shard="s")["x"]
    assert isinstance(column, ObjectColumn)
    assert column.take(np.arange(len(values))[::-1]) == values[::-1]


def test_a_path_without_the_files_bytes_is_refused_and_no_file_is_none() -> None:
    files = [{"bytes": b"x", "path": "a.jpg"}, None, {"bytes": None, "path": None}]
    column = to_columns("image", pa.array(files, FILE), nulls=True, shard="s")["image"]
    assert isinstance(column, BytesColumn)
    assert column.take(np.arange(3)) == [b"x", None, None]
    files.append({"bytes": None, "path": "/data/b.jpg"})
    with pytest.raises(FormatError, match=r"^s: column 'image' holds a path \('/data/b.jpg'\) without bytes"):
        to_columns("image", pa.array(files, FILE), nulls=True, shard="s")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (pa.float16(), "float16"),
        (pa.large_string(), "string"),
        (pa.binary(4), "binary"),
        (pa.dictionary(pa.int8(), pa.string()), "string"),
        (pa.list_(pa.field("element", pa.int8())), "list<int8>"),
        (pa.list_(pa.list_(pa.float64(), 2), 3), "float64[2][3]"),
        (FILE, "struct<bytes: binary, path: string>"),
        (pa.map_(pa.string(), pa.bool_()), "map<string, bool>"),
        (pa.timestamp("us", "UTC"), "timestamp[us, tz=UTC]"),
    ],
)
def test_types_are_described_by_what_they_hold(kind: pa.DataType, text: str) -> None:
    assert describe_type(kind) == text


@pytest.mark.parametrize("kind", [*KINDS, pa.list_(pa.string(), 2), pa.list_(pa.list_(pa.int8())), TENSOR], ids=str)
def test_nulls_of_no_type_are_read_as_nulls_of_the_type_that_was_described(kind: pa.DataType) -> None:
    read = typed_kind(pa.null(), describe_type(kind))
    found, wanted = (to_columns("x", pa.nulls(3, each), nulls=True, shard="s") for each in (read, kind))
    assert list(found) == list(wanted)
    for ours, theirs in zip(found.values(), wanted.values(), strict=True):
        assert type(ours) is type(theirs)
        if isinstance(ours, ArrayColumn) and isinstance(theirs, ArrayColumn):
            assert ours.values.dtype == theirs.values.dtype
            np.testing.assert_array_equal(ours.values, theirs.values)
        elif isinstance(ours, BytesColumn) and isinstance(theirs, BytesColumn):
            assert ours.text == theirs.text
        assert value_bytes(read) == value_bytes(kind)


@pytest.mark.parametrize("described", ["timestamp[x, tz=UTC]", "int8[9999999999]", "struct<a: int8>", "list<", "?", ""])
def test_nulls_of_a_type_that_is_not_understood_are_no_values(described: str) -> None:
    (column,) = to_columns("x", pa.nulls(2, typed_kind(pa.null(), described)), nulls=True, shard="s").values()
    assert isinstance(column, ObjectColumn)
    assert column.take(np.arange(2)) == [None, None]
