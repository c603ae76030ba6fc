"""Dictionaries of text and bytes as they are: values that many rows share lie in memory once."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from ...columns import BytesColumn, IntArray


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
        rows = array.indices.fill_null(0).to_numpy(zero_copy_only=False).astype(np.int64)
        if array.indices.null_count:
            rows[array.indices.is_null().to_numpy(zero_copy_only=False)] = len(values)
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
    return np.where(values.is_null().to_numpy(zero_copy_only=False), -1, offsets[:-1]), offsets[1:]


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
