"""MDS encodings: how the bytes of one column of many samples become a column.

Layouts as mosaicml-streaming documents them for its ``MDSWriter``.

| encoding | column |
| --- | --- |
| int, int8..int64, uint8..uint64, float16..float64 | ArrayColumn |
| ndarray:DTYPE:SHAPE | ArrayColumn of that shape |
| ndarray, ndarray:DTYPE | EncodedColumn of NumPy arrays, as their shapes may differ |
| str | BytesColumn of text |
| bytes, jpeg, png | BytesColumn |
| pil, jpeg_array, jpegarray, list[...] | BytesColumn of the bytes as they are stored |
| json, str_int, str_float, str_decimal | EncodedColumn of Python values |
| pkl | none: unpickling runs code that the data brings along |
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa

from ..columns import AnyArray, ArrayColumn, BytesColumn, Column, IntArray, ObjectColumn
from ..errors import ConfigError, DecodeError, FormatError

_SCALARS = {"int": "int64"} | {
    name: name
    for name in "int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split()  # noqa: SIM905
}
_BYTES = {"bytes", "jpeg", "png", "pil", "jpeg_array", "jpegarray", "list[pil]", "list[jpeg]", "list[png]"}
_ARRAY_DTYPES = {
    8: "u1",
    9: "i1",
    16: "u2",
    17: "i2",
    18: "f2",
    32: "u4",
    33: "i4",
    34: "f4",
    64: "u8",
    65: "i8",
    66: "f8",
}
# The same by the dtype's name, for writers.
ARRAY_CODES = {np.dtype(kind).name: code for code, kind in _ARRAY_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class EncodedColumn(ObjectColumn):
    """Values kept encoded, as an Arrow array of binaries, and decoded one by one when they are taken."""

    encoding: str
    decode: Callable[[bytes], Any]

    def take(self, rows: IntArray) -> list[Any]:
        """The values of ``rows``. Raises DecodeError."""
        try:
            return [self.decode(value) for value in ObjectColumn.take(self, rows)]
        except (ValueError, ArithmeticError, LookupError, RecursionError, TypeError) as exc:
            raise DecodeError(f"a value cannot be decoded as MDS encoding {self.encoding!r}: {exc!r}") from exc


def fixed_layout(encoding: str) -> tuple[np.dtype[Any], tuple[int, ...]] | None:
    """dtype and shape of an encoding's values where both are fixed, else None. Raises ValueError if malformed."""
    name, _, arguments = encoding.partition(":")
    if name in _SCALARS and not arguments:
        return np.dtype(_SCALARS[name]).newbyteorder("<"), ()
    if name == "ndarray" and ":" in arguments:
        dtype, shape = arguments.split(":")
        sizes = tuple(int(size) for size in shape.split(","))
        if min(sizes) < 0:
            raise ValueError(f"an ndarray of shape {sizes}")
        return _array_dtype(dtype), sizes
    return None


def fixed_size(encoding: str) -> int | None:
    """Bytes that every value takes; None where each has its own size."""
    layout = fixed_layout(encoding)
    return None if layout is None else layout[0].itemsize * math.prod(layout[1])


def make_column(name: str, encoding: str, data: memoryview, starts: IntArray, stops: IntArray, shard: str) -> Column:
    """The column whose value i is encoded in ``data[starts[i]:stops[i]]``, all within ``data``.

    Raises:
        ConfigError: the column is pickled.
        FormatError: the encoding is not known.
    """
    layout = fixed_layout(encoding)
    if layout is not None:
        return ArrayColumn(gather(data, starts, *layout))
    if encoding in _BYTES:
        return BytesColumn(data, starts, stops)
    if encoding == "str":
        return BytesColumn(data, starts, stops, text=True)
    if encoding == "pkl":
        raise ConfigError(
            f"column {name!r} of {shard} is pickled (encoding 'pkl') and is never unpickled; "
            "leave it out with columns=, or write it as json, ndarray or bytes"
        )
    decode = _decoder(encoding)
    if decode is None:
        raise FormatError(shard, f"column {name!r} has the encoding {encoding!r}, which is not known; leave it out")
    return EncodedColumn(_pack(data, starts, stops), encoding, decode)


def gather(data: memoryview, starts: IntArray, dtype: np.dtype[Any], shape: tuple[int, ...] = ()) -> AnyArray:
    """(len(starts), *shape): the values that start at ``starts``, which need not be aligned."""
    count, size = len(starts), dtype.itemsize * math.prod(shape)
    if count == 0 or size == 0:
        return np.empty((count, *shape), dtype)
    # One opaque value a sample is moved faster than several numbers.
    cell = dtype if shape == () else np.dtype((np.void, size))
    steps = np.diff(starts)
    if count > 1 and steps[0] > 0 and (steps == steps[0]).all():
        # Samples of one size: a strided copy is several times faster than a gather.
        cells: AnyArray = np.ndarray((count,), cell, data, offset=int(starts[0]), strides=(int(steps[0]),))
        packed = np.ascontiguousarray(cells)
    else:
        windows: AnyArray = np.ndarray((len(data) - size + 1,), cell, data, strides=(1,))
        packed = windows[starts]
    return packed.view(dtype).reshape(count, *shape)


def _pack(data: memoryview, starts: IntArray, stops: IntArray) -> pa.Array:
    """The slices one after another, as an Arrow array of binaries."""
    offsets = np.zeros(len(starts) + 1, np.int64)
    np.cumsum(stops - starts, out=offsets[1:])
    where = np.arange(offsets[-1]) + np.repeat(starts - offsets[:-1], stops - starts)
    packed = np.frombuffer(data, np.uint8)[where]
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(packed)]
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(starts), buffers)


def _decoder(encoding: str) -> Callable[[bytes], Any] | None:
    name, _, arguments = encoding.partition(":")
    if name == "ndarray":
        dtype = _array_dtype(arguments) if arguments else None
        return lambda value: _decode_array(value, dtype)
    decoders: dict[str, Callable[[bytes], Any]] = {
        "json": json.loads,
        "str_int": lambda value: int(value.decode()),
        "str_float": lambda value: float(value.decode()),
        "str_decimal": lambda value: Decimal(value.decode()),
    }
    return decoders.get(encoding)


def _decode_array(value: bytes, dtype: np.dtype[Any] | None) -> AnyArray:
    """[dtype code: 1, where not fixed] [ndim << 2 | log2 of a size's bytes: 1] [shape] [values]"""
    at = 0
    if dtype is None:
        dtype, at = np.dtype(_ARRAY_DTYPES[value[0]]).newbyteorder("<"), 1
    ndim, size_bytes = value[at] >> 2, 1 << (value[at] & 3)
    shape = np.frombuffer(value, f"<u{size_bytes}", count=ndim, offset=at + 1)
    values = np.frombuffer(value, dtype, offset=at + 1 + ndim * size_bytes)
    return values.reshape(shape.astype(np.int64)).copy()


def _array_dtype(name: str) -> np.dtype[Any]:
    if name not in _SCALARS or name == "int":
        raise ValueError(f"an ndarray of {name!r}")
    return np.dtype(name).newbyteorder("<")
