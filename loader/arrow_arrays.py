"""Arrow's arrays of numbers as numpy's, and back, without pandas.

Where pandas is installed, pyarrow imports it before it makes its first array or scalar of values of Python's or numpy's
(`pa.array`, `pa.scalar`), or of numpy's of its own (`pa.Array.to_numpy`, `np.asarray`). That takes half a second, which
nobody who reads samples needs. Their buffers can be had without it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]


def wrap_numbers(numbers: AnyArray) -> pa.Array:
    """Wrap integers or floats (n,) in an Arrow array, on the same memory where that is contiguous; pack bools."""
    values = np.ascontiguousarray(numbers)
    data = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(data)])


def wrap_lists(lists: Sequence[AnyArray], dtype: np.dtype[Any]) -> pa.ListArray:
    """Copy arrays (n,) of numbers into an Arrow array of lists; together they have fewer than 2^31."""
    offsets = np.zeros(len(lists) + 1, np.int32)
    np.cumsum([len(each) for each in lists], out=offsets[1:])
    values = np.concatenate([np.empty(0, dtype), *lists]).astype(dtype, copy=False)
    return pa.ListArray.from_arrays(wrap_numbers(offsets), wrap_numbers(values))


def wrap_texts(texts: Sequence[str]) -> pa.StringArray:
    """Copy texts into an Arrow array; together they have fewer than 2^31 bytes."""
    encoded = [text.encode() for text in texts]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(each) for each in encoded], out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def view_numbers(array: pa.Array | pa.ChunkedArray) -> AnyArray:
    """View integers, floats or bools as a numpy array (n,), of the same memory if it is one piece of numbers.

    What stands in the places of nulls is arbitrary.
    """
    if isinstance(array, pa.ChunkedArray):
        parts = [view_numbers(chunk) for chunk in array.chunks]
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, _dtype_of(array.type)), *parts])
    data = array.buffers()[1]
    if pt.is_boolean(array.type):
        return unpack_bits(data, array.offset, len(array))
    dtype = _dtype_of(array.type)
    if data is None or not len(array):
        return np.zeros(len(array), dtype)
    return np.frombuffer(data, dtype, count=len(array), offset=array.offset * dtype.itemsize)


def find_nulls(array: pa.Array) -> AnyArray:
    """Find the nulls of an array of a type with a bitmap of them: (n,) bool."""
    if not array.null_count:
        return np.zeros(len(array), np.bool_)
    return ~unpack_bits(array.buffers()[0], array.offset, len(array))


def unpack_bits(buffer: pa.Buffer | None, offset: int, length: int) -> AnyArray:
    """Unpack Arrow's bits as np.bool_, an array of its own; all False without a buffer."""
    if buffer is None or length == 0:
        return np.zeros(length, np.bool_)
    first, last = offset // 8, (offset + length + 7) // 8
    packed = np.frombuffer(buffer, np.uint8, count=last - first, offset=first)
    return np.unpackbits(packed, bitorder="little")[offset - 8 * first :][:length].view(np.bool_)


def _dtype_of(kind: pa.DataType) -> np.dtype[Any]:
    if pt.is_boolean(kind):
        return np.dtype(np.bool_)
    if not pt.is_integer(kind) and not pt.is_floating(kind):
        raise ValueError(f"values of type {kind} are no numbers")
    letter = "f" if pt.is_floating(kind) else "u" if pt.is_unsigned_integer(kind) else "i"
    return np.dtype(f"{letter}{kind.bit_width // 8}")
