"""Arrow arrays as columns: zero-copy where the layouts agree, with types that depend on the schema, never on a chunk.

| Arrow type | column |
| --- | --- |
| integers, bool | ArrayColumn; where the data set has nulls: 0 there, and a bool ArrayColumn ``NAME__null`` |
| floats | ArrayColumn; null is NaN |
| timestamp, date, time, duration | ArrayColumn of int64 in the schema's unit (date32: days); nulls as for integers |
| fixed_size_list of these, fixed-shape tensor (as it lies in memory) | ArrayColumn of shape (samples, ...) |
| string | BytesColumn of text |
| binary, struct<bytes: binary, path: string> | BytesColumn; of a struct (an image or sound with its name), the bytes |
| dictionary | what its values are; of text and binaries, slices of the dictionary itself |
| all else: lists, structs, maps, decimals | ObjectColumn |
"""

from __future__ import annotations

import reprlib
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from ...arrow_arrays import find_nulls, unpack_bits, view_numbers
from ...columns import AnyArray, ArrayColumn, BytesColumn, Column, IntArray, ObjectColumn
from ...errors import FormatError
from ..schema import NULL_SUFFIX, refuse_null_clash


def dictionary_slices(arrays: list[pa.DictionaryArray], *, text: bool) -> BytesColumn:
    """The values of dictionary arrays, one after another, as slices of their dictionaries. A null is missing."""
    buffers: list[memoryview] = []
    firsts: dict[tuple[int, int], int] = {}  # where the bytes at an address, of a length, begin in what is joined
    size = 0
    starts: list[IntArray] = []
    stops: list[IntArray] = []
    for array in arrays:
        values = array.dictionary.cast(pa.large_string() if text else pa.large_binary())
        data = values.buffers()[2]
        place = (0, 0) if data is None else (data.address, data.size)
        if place not in firsts:
            firsts[place] = size
            buffers.append(memoryview(b"") if data is None else memoryview(data).cast("B"))
            size += len(buffers[-1])
        begins, ends = _bounds(values)
        rows = view_numbers(array.indices).astype(np.int64)
        if array.indices.null_count:
            rows[find_nulls(array.indices)] = len(values)
        base = firsts[place]
        starts.append(np.append(np.where(begins < 0, -1, begins + base), -1)[rows])
        stops.append(np.append(ends + base, -1)[rows])
    joined = buffers[0] if len(buffers) == 1 else memoryview(b"".join(buffers))
    nothing = [np.zeros(0, np.int64)]
    return BytesColumn(joined, np.concatenate(starts or nothing), np.concatenate(stops or nothing), text)


def _bounds(values: pa.Array) -> tuple[IntArray, IntArray]:
    """Starts, -1 for null, and ends of the values of large text or binaries."""
    buffer = values.buffers()[1]
    if buffer is None or not len(values):
        return np.zeros(len(values), np.int64), np.zeros(len(values), np.int64)
    offsets: IntArray = np.frombuffer(buffer, np.int64, count=len(values) + 1, offset=8 * values.offset)
    if not values.null_count:
        return offsets[:-1], offsets[1:]
    return np.where(find_nulls(values), -1, offsets[:-1]), offsets[1:]


def is_shared_text(kind: pa.DataType) -> bool:
    """Return whether a type is a dictionary of text or binaries."""
    if not pt.is_dictionary(kind):
        return False
    value = kind.value_type
    return bool(
        pt.is_string(value)
        or pt.is_large_string(value)
        or pt.is_string_view(value)
        or pt.is_binary(value)
        or pt.is_large_binary(value)
        or pt.is_binary_view(value)
        or pt.is_fixed_size_binary(value)
    )


def file_bytes(array: pa.StructArray, name: str, shard: str) -> pa.Array:
    """The bytes of each file in a column; null where there is no file.

    Raises:
        FormatError: there is a path without bytes, so that the file lies elsewhere.
    """
    children = array.flatten()
    data = children[array.type.get_field_index("bytes")]
    if data.null_count:
        paths = children[array.type.get_field_index("path")].filter(data.is_null()).drop_null()
        if len(paths):
            path = reprlib.repr(paths[0].as_py())
            raise FormatError(
                shard,
                f"column {name!r} holds a path ({path}) without bytes, and files elsewhere are not read; write the "
                "table with the bytes in it, as datasets' to_parquet() does, or leave the column out",
            )
    return data


_NUMPY = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.uint32(): np.uint32,
    pa.uint64(): np.uint64,
    pa.float16(): np.float16,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}
_UNREAD = frozenset({"month_interval", "day_time_interval"})
# Thousands of shards have the same few types.
_TYPES_KEPT = 256


class UntoldNullsError(FormatError):
    """A ``column`` holds nulls although the index says that it has none."""

    def __init__(self, column: str, shard: str) -> None:
        super().__init__(
            shard, f"column {column!r} holds nulls, but the index says that it has none; index the data set again"
        )
        self.column = column


@lru_cache(_TYPES_KEPT)
def describe_type(kind: pa.DataType) -> str:
    """A type's name, the same for types of other encoding (large_string, a dictionary, the names inside of a list)."""
    if pt.is_dictionary(kind):
        return describe_type(kind.value_type)
    if isinstance(kind, pa.FixedShapeTensorType):
        return f"{describe_type(kind.value_type)}[{', '.join(map(str, kind.shape))}]"
    if isinstance(kind, pa.BaseExtensionType):
        return describe_type(kind.storage_type)
    if is_text(kind):
        return "string"
    if is_binary(kind):
        return "binary"
    if pt.is_fixed_size_list(kind):
        return f"{describe_type(kind.value_type)}[{kind.list_size}]"
    if is_list(kind):
        return f"list<{describe_type(kind.value_type)}>"
    if pt.is_struct(kind):
        if is_file_struct(kind):
            kind = with_paths(kind)
        fields = (kind.field(i) for i in range(kind.num_fields))
        return f"struct<{', '.join(f'{field.name}: {describe_type(field.type)}' for field in fields)}>"
    if pt.is_map(kind):
        return f"map<{describe_type(kind.key_type)}, {describe_type(kind.item_type)}>"
    return np.dtype(_NUMPY[kind]).name if kind in _NUMPY else str(kind)


def check_names(schema: pa.Schema) -> None:
    """Raise UnicodeDecodeError where a name in a schema is not UTF-8, which pyarrow finds when the name is used."""
    for field in schema:
        _ = field.name, describe_type(field.type)


@lru_cache(_TYPES_KEPT)
def find_unread(kind: pa.DataType) -> str:
    """The intervals in a type of which pyarrow has no values, which it finds when these are used; '' where none is."""
    if str(kind) in _UNREAD:
        return str(kind)
    if isinstance(kind, pa.BaseExtensionType) or pt.is_dictionary(kind):
        return find_unread(kind.value_type if pt.is_dictionary(kind) else kind.storage_type)
    return next(filter(None, (find_unread(kind.field(i).type) for i in range(kind.num_fields))), "")


@lru_cache(_TYPES_KEPT)
def marks_nulls(kind: pa.DataType) -> bool:
    """Return whether a column of this type needs ``NAME__null`` beside it if a value may be null."""
    if pt.is_dictionary(kind):
        return marks_nulls(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return marks_nulls(kind.storage_type)
    if pt.is_fixed_size_list(kind):
        return marks_nulls(kind.value_type)
    return pt.is_integer(kind) or pt.is_boolean(kind) or _is_temporal(kind)


@lru_cache(_TYPES_KEPT)
def value_bytes(kind: pa.DataType) -> int | None:
    """Bytes that one value takes as an ArrayColumn; None for columns of other kinds."""
    if pt.is_dictionary(kind):
        return value_bytes(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return value_bytes(kind.storage_type)
    if pt.is_fixed_size_list(kind):
        inner = value_bytes(kind.value_type)
        return None if inner is None else inner * kind.list_size
    if pt.is_boolean(kind):
        return 1
    if _is_temporal(kind):
        return 8
    return np.dtype(_NUMPY[kind]).itemsize if kind in _NUMPY else None


def schema_columns(schema: pa.Schema, nullable: set[str], shard: str) -> dict[str, dict[str, Any]]:
    """The ``columns`` of a manifest's schema; ``nullable`` names those in which the shard has, or may have, nulls.

    Raises:
        FormatError: two columns have one name, or one that another's ``__null`` needs, or one is not read by its type.
    """
    columns: dict[str, dict[str, Any]] = {}
    for column in schema:
        if cure := _cure(column.type):
            raise FormatError(shard, f"column {column.name!r} is {column.type}; write its values {cure}")
        if column.name in columns:
            raise FormatError(shard, f"has two columns named {column.name!r}; rename one")
        columns[column.name] = {"type": describe_type(column.type), "nulls": column.name in nullable}
    refuse_null_clash(columns, (column.name for column in schema if marks_nulls(column.type)), shard)
    return columns


@lru_cache(_TYPES_KEPT)
def _cure(kind: pa.DataType) -> str:
    """Suggest how else to write an unsupported type: run ends, which pyarrow cannot slice by rows, or permuted axes."""
    if isinstance(kind, pa.FixedShapeTensorType) and kind.permutation not in (None, [*range(len(kind.shape))]):
        return "in the order of their axes, without a permutation"
    if isinstance(kind, pa.BaseExtensionType) or pt.is_dictionary(kind):
        return _cure(kind.value_type if pt.is_dictionary(kind) else kind.storage_type)
    cures = (_cure(kind.field(i).type) for i in range(kind.num_fields))
    return "without run ends" if pt.is_run_end_encoded(kind) else next(filter(None, cures), "")


def to_columns(name: str, values: pa.Array | pa.ChunkedArray, *, nulls: bool, shard: str) -> dict[str, Column]:
    """One Arrow column as one column, or as two where ``nulls`` are possible and values alone cannot say so.

    The result shares memory with ``values`` wherever it can, and is then read-only.

    Raises:
        FormatError: nulls though the data set was indexed as having none, or files' paths without their bytes.
    """
    if is_shared_text(values.type):
        arrays = values.chunks if isinstance(values, pa.ChunkedArray) else [values]
        return {name: dictionary_slices(arrays, text=is_text(values.type.value_type))}
    array = _as_one(values)
    kind = array.type
    if pt.is_struct(kind) and is_file_struct(kind):
        return {name: slices(file_bytes(array, name, shard), text=False)}
    if is_text(kind) or is_binary(kind):
        return {name: slices(array, text=is_text(kind))}
    if value_bytes(kind) is None:
        plain = _without_views(kind)
        return {name: ObjectColumn(array if plain == kind else array.cast(plain))}
    dense, missing = _dense(array)
    if isinstance(values.type, pa.FixedShapeTensorType):
        dense = dense.reshape(len(array), *values.type.shape)
        missing = None if missing is None else missing.reshape(dense.shape)
    if missing is not None:
        if not nulls and marks_nulls(kind):
            raise UntoldNullsError(name, shard)
        dense = _blank(dense, missing)
    columns: dict[str, Column] = {name: ArrayColumn(dense)}
    if nulls and marks_nulls(kind):
        columns[name + NULL_SUFFIX] = ArrayColumn(np.zeros(dense.shape, np.bool_) if missing is None else missing)
    return columns


def _as_one(values: pa.Array | pa.ChunkedArray) -> pa.Array:
    """One plain array: chunks concatenated, dictionaries decoded, extension types unwrapped."""
    if isinstance(values, pa.ChunkedArray):
        if values.num_chunks == 1:
            values = values.chunk(0)
        elif pt.is_string(values.type) or pt.is_binary(values.type):
            # Two chunks may hold more than the 2 GiB that 32-bit offsets reach.
            values = pa.concat_arrays(values.cast(_large(values.type)).chunks or [pa.nulls(0, _large(values.type))])
        else:
            values = values.combine_chunks()
            if isinstance(values, pa.ChunkedArray):
                values = values.chunk(0)
    return _without_encoding(values)


def _without_encoding(array: pa.Array) -> pa.Array:
    """A dictionary decoded, an extension type unwrapped; the values of a fixed-size list may be either, too."""
    if isinstance(array.type, pa.BaseExtensionType):
        array = array.storage
    return array.dictionary_decode() if pt.is_dictionary(array.type) else array


def _dense(array: pa.Array) -> tuple[AnyArray, AnyArray | None]:
    """Values (samples, ...) and, where there are nulls, a bool array of the same shape that is true for them."""
    array = _without_encoding(array)
    kind, length = array.type, len(array)
    missing: AnyArray | None = ~unpack_bits(array.buffers()[0], array.offset, length) if array.null_count else None
    if pt.is_fixed_size_list(kind):
        values, inner = _dense(flat_values(array))
        values = values.reshape(length, kind.list_size, *values.shape[1:])
        if inner is not None:
            inner = inner.reshape(values.shape)
        if missing is not None:
            spread = np.broadcast_to(missing.reshape(length, *(1,) * (values.ndim - 1)), values.shape)
            inner = spread.copy() if inner is None else inner | spread
        return values, inner
    data = array.buffers()[1]
    if pt.is_boolean(kind):
        return unpack_bits(data, array.offset, length), missing
    dtype: np.dtype[Any] = np.dtype(_NUMPY.get(kind) or f"i{kind.bit_width // 8}")
    if data is None or length == 0:
        values = np.empty(length, dtype)
    else:
        values = np.frombuffer(data, dtype, count=length, offset=array.offset * dtype.itemsize)
    return (values.astype(np.int64) if _is_temporal(kind) and dtype.itemsize == 4 else values), missing


def _blank(values: AnyArray, missing: AnyArray) -> AnyArray:
    """A copy with 0, or NaN, where ``missing``; by arithmetic on all values, which is 5 times faster than choosing."""
    if values.dtype.kind != "f":
        return np.multiply(values, ~missing)
    bits = np.dtype(f"u{values.dtype.itemsize}")
    # A float whose bits are all set is a NaN.
    ones = np.multiply(missing, np.iinfo(bits).max, dtype=bits)
    return np.bitwise_or(values.view(bits), ones, out=ones).view(values.dtype)


def flat_values(array: pa.FixedSizeListArray) -> pa.Array:
    """All slots of a fixed-size list, those of nulls too (``flatten`` would leave them out)."""
    size = array.type.list_size
    return array.values.slice(array.offset * size, len(array) * size)


def slices(array: pa.Array, *, text: bool) -> BytesColumn:
    kind, length = array.type, len(array)
    if not (pt.is_fixed_size_binary(kind) or has_offsets(kind)):
        array = array.cast(pa.large_string() if text else pa.large_binary())
        kind = array.type
    buffers = array.buffers()
    if pt.is_fixed_size_binary(kind):
        starts: IntArray = np.arange(array.offset, array.offset + length, dtype=np.int64) * kind.byte_width
        stops = starts + kind.byte_width
    else:
        offsets = value_offsets(array)
        starts, stops = offsets[:-1], offsets[1:]
    if array.null_count:
        starts = np.where(unpack_bits(buffers[0], array.offset, length), starts, -1)
    data = buffers[-1]
    return BytesColumn(memoryview(b"") if data is None else memoryview(data).cast("B"), starts, stops, text)


def _without_views(kind: pa.DataType) -> pa.DataType:
    """The type with text and binaries that have offsets: pyarrow takes no rows of nested views."""
    if pt.is_string_view(kind):
        return pa.large_string()
    if pt.is_binary_view(kind):
        return pa.large_binary()
    if pt.is_struct(kind):
        return pa.struct([field.with_type(_without_views(field.type)) for field in kind])
    if pt.is_list(kind) or pt.is_large_list(kind):
        make = pa.list_ if pt.is_list(kind) else pa.large_list
        return make(kind.value_field.with_type(_without_views(kind.value_type)))
    if pt.is_fixed_size_list(kind):
        return pa.list_(kind.value_field.with_type(_without_views(kind.value_type)), kind.list_size)
    if pt.is_map(kind):
        return pa.map_(_without_views(kind.key_type), kind.item_field.with_type(_without_views(kind.item_type)))
    return kind


def value_offsets(array: pa.Array) -> IntArray:
    """Offsets of the values of text or binaries in their buffer: (length + 1,) int64."""
    buffer, length = array.buffers()[1], len(array)
    if buffer is None or length == 0:
        return np.zeros(length + 1, np.int64)
    wide = pt.is_large_string(array.type) or pt.is_large_binary(array.type)
    dtype = np.dtype(np.int64 if wide else np.int32)
    raw = np.frombuffer(buffer, dtype, count=length + 1, offset=array.offset * dtype.itemsize)
    return raw.astype(np.int64)


def offsets_rise(array: pa.Array) -> bool:
    """Return whether the offsets of text or binaries never decrease."""
    return bool((np.diff(value_offsets(array)) >= 0).all())


def _large(kind: pa.DataType) -> pa.DataType:
    return pa.large_string() if pt.is_string(kind) else pa.large_binary()


def has_offsets(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_binary(kind) or pt.is_large_binary(kind))


def is_text(kind: pa.DataType) -> bool:
    return bool(pt.is_string(kind) or pt.is_large_string(kind) or pt.is_string_view(kind))


def is_binary(kind: pa.DataType) -> bool:
    return bool(
        pt.is_binary(kind) or pt.is_large_binary(kind) or pt.is_binary_view(kind) or pt.is_fixed_size_binary(kind)
    )


def is_list(kind: pa.DataType) -> bool:
    return bool(pt.is_list(kind) or pt.is_large_list(kind) or pt.is_list_view(kind) or pt.is_large_list_view(kind))


def _is_temporal(kind: pa.DataType) -> bool:
    # A calendar interval has three parts, and is no number.
    return bool(pt.is_timestamp(kind) or pt.is_date(kind) or pt.is_time(kind) or pt.is_duration(kind))


def is_file_struct(kind: pa.DataType) -> bool:
    """Return whether a struct is a file embedded in a table (`.embedded`); if no file has a path, paths are untyped."""
    if {field.name for field in kind} != {"bytes", "path"} or kind.num_fields != 2:
        return False
    path = kind.field("path").type
    return is_binary(kind.field("bytes").type) and (is_text(path) or pt.is_null(path))


def with_paths(kind: pa.StructType) -> pa.StructType:
    """The struct of a file with a path that is text, also where it has no type."""
    return pa.struct([field.with_type(pa.string()) if pt.is_null(field.type) else field for field in kind])


def value_sizes(array: pa.Array) -> IntArray:
    """(len(array),) int64: the bytes of each value, of strings and lists what they hold; 0 for nulls."""
    kind, length = array.type, len(array)
    if isinstance(array, pa.ExtensionArray):
        return value_sizes(array.storage)
    if pt.is_dictionary(kind):
        return value_sizes(array.dictionary_decode())
    if pt.is_map(kind):
        ends = view_numbers(array.offsets).astype(np.int64)
        sums = np.concatenate([[0], np.cumsum(value_sizes(array.keys) + value_sizes(array.items))])
        sizes = sums[ends[1:]] - sums[ends[:-1]]
    elif is_list(kind):
        import pyarrow.compute as pc  # which takes long to import

        parents = view_numbers(pc.list_parent_indices(array)).astype(np.int64)
        sizes = np.bincount(parents, weights=value_sizes(pc.list_flatten(array)), minlength=length)
    elif pt.is_fixed_size_list(kind):
        sizes = value_sizes(flat_values(array)).reshape(length, kind.list_size).sum(axis=1)
    elif pt.is_struct(kind):
        sizes = sum((value_sizes(part) for part in array.flatten()), np.zeros(length, np.int64))
    elif is_text(kind) or is_binary(kind):
        found = slices(array, text=is_text(kind))
        return np.where(found.starts >= 0, found.stops - found.starts, 0)
    else:
        width = 0 if pt.is_null(kind) else 1 if pt.is_boolean(kind) else kind.bit_width // 8
        sizes = np.full(length, width, np.int64)
    if array.null_count:
        sizes = np.where(unpack_bits(array.buffers()[0], array.offset, length), sizes, 0)
    return np.asarray(sizes, dtype=np.int64)
