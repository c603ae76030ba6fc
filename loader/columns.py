"""Columns of an opened chunk, and the array types that they are made of."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa

from ..storage.memory.buffers import BUFFERS
from .arrow_arrays import AnyArray, view_numbers, wrap_numbers
from .order.cached import cached_property
from .order.permutation import IntArray

__all__ = [
    "EXACT_INTEGERS",
    "KEY_COLUMN",
    "AnyArray",
    "ArrayColumn",
    "Block",
    "BytesColumn",
    "Column",
    "IntArray",
    "ObjectColumn",
    "Ragged",
    "Records",
    "float_holds",
    "join_slices",
    "python_values",
]

# The sample's key, where the format has keys: text, and the same for every member of a sample.
KEY_COLUMN = "__key__"

# From here on float64 leaves integers out.
EXACT_INTEGERS = 1 << 53
_MOST_FLOAT64 = int(sys.float_info.max)

# So few that their slices do not wake the interpreter's garbage collector, to which memoryviews are known.
_JOINED_AT_ONCE = 256
# With more than 500 numbers numpy gives Python's lock away, and waits for it again.
_LOOKED_AT = 250


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """Values of one shape and dtype: ``values`` is (samples, *shape)."""

    values: AnyArray

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


@dataclass(frozen=True)
class BytesColumn:
    """Values that are slices of one buffer: value i is ``buffer[starts[i]:stops[i]]``, missing where starts[i] < 0.

    With ``text`` the values are UTF-8 and are handed out as str. ``ascii`` may hold the whole buffer as one str, if it
    is ASCII. The columns of a block share the buffer; ``Block.nbytes`` counts it once.
    """

    buffer: memoryview
    starts: IntArray
    stops: IntArray
    text: bool = False
    ascii: str | None = None

    @cached_property
    def bytes_about(self) -> int:
        """Bytes of all values, about: as some of them have that lie at equal distances."""
        distance = 1 + len(self.starts) // _LOOKED_AT
        starts, stops = self.starts[::distance], self.stops[::distance]
        return int((stops - starts)[starts >= 0].sum()) * len(self.starts) // max(1, len(starts))

    def take(self, rows: IntArray) -> list[Any]:
        """Copies of the values of ``rows`` as bytes or str; None where missing."""
        starts, stops = self.starts[rows].tolist(), self.stops[rows].tolist()
        # Slicing bytes or str copies in one step; slicing a memoryview would first make a view and throw it away.
        whole = self.ascii if self.text else self.buffer.obj
        if whole is not None and type(whole) in (bytes, str) and len(whole) == len(self.buffer):  # type: ignore[arg-type]
            return [whole[a:b] if a >= 0 else None for a, b in zip(starts, stops, strict=True)]  # type: ignore[index]
        buffer = self.buffer
        if self.text:
            return [str(buffer[a:b], "utf-8") if a >= 0 else None for a, b in zip(starts, stops, strict=True)]
        return [buffer[a:b].tobytes() if a >= 0 else None for a, b in zip(starts, stops, strict=True)]

    def copies(self, rows: IntArray) -> list[memoryview | None]:
        """Copies of the values of ``rows`` as memoryviews, for decoders; None where missing.

        Views into the buffer would keep all of it in memory until the last of them is decoded.
        """
        return [None if value is None else memoryview(value) for value in self.take(rows)]


@dataclass(frozen=True, slots=True)
class ObjectColumn:
    """Values of any other kind: strings, lists, structs and the like, kept as an Arrow array until they are taken."""

    values: pa.Array

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    @property
    def num_rows(self) -> int:
        return len(self.values)

    def take(self, rows: IntArray) -> list[Any]:
        """The values of ``rows`` as Python objects; None where null. Times finer than Python's are NumPy's."""
        taken = self.values.take(wrap_numbers(rows))
        try:
            return python_values(taken)
        except ValueError:
            return _exact_values(taken)

    def as_ragged(self) -> Ragged | None:
        """All values, on the memory that they are in; None where they are not lists of integers, or some are null."""
        kind = self.values.type
        if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not pa.types.is_integer(kind.value_type):
            return None
        if self.values.null_count or self.values.values.null_count:
            return None
        offsets = view_numbers(self.values.offsets).astype(np.int64)
        return Ragged(view_numbers(self.values.values)[offsets[0] :], offsets - offsets[0])


@dataclass(frozen=True, slots=True)
class Ragged:
    """n arrays end to end: array i is ``values[offsets[i]:offsets[i + 1]]``; ``offsets`` (n + 1,) int64 begin at 0."""

    values: AnyArray
    offsets: IntArray

    @classmethod
    def join(cls, arrays: Sequence[AnyArray]) -> Ragged:
        """Of arrays given one by one; their dtype is one that holds all."""
        offsets = np.zeros(len(arrays) + 1, np.int64)
        np.cumsum(np.fromiter(map(len, arrays), np.int64, len(arrays)), out=offsets[1:])
        # Empty arrays say nothing about the dtype.
        filled = [array for array in arrays if len(array)]
        return cls(np.concatenate(filled) if filled else np.empty(0, np.int64), offsets)

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes + self.offsets.nbytes)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> AnyArray:
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[AnyArray]:
        return map(self.__getitem__, range(len(self)))

    def cut(self, start: int, stop: int) -> Ragged:
        """The arrays from ``start`` to ``stop``, on the memory that they are in."""
        offsets = self.offsets[start : stop + 1]
        return Ragged(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])

    def take(self, rows: IntArray) -> Ragged:
        """The arrays of ``rows``, end to end."""
        lengths = np.diff(self.offsets)[rows]
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        where = np.arange(int(offsets[-1])) + np.repeat(self.offsets[rows] - offsets[:-1], lengths)
        return Ragged(self.values.take(where), offsets)

    @classmethod
    def merge(cls, count: int, parts: Sequence[tuple[IntArray, Ragged, IntArray]]) -> Ragged:
        """``count`` arrays, of parts (targets, arrays, rows): array ``rows[i]`` becomes number ``targets[i]``."""
        lengths, firsts, origins = np.zeros((3, count), np.int64)
        for origin, (targets, part, rows) in enumerate(parts):
            firsts[targets], lengths[targets] = part.offsets[rows], np.diff(part.offsets)[rows]
            origins[targets] = origin
        offsets = np.zeros(count + 1, np.int64)
        np.cumsum(lengths, out=offsets[1:])
        dtype = np.result_type(*(part.values.dtype for _, part, _ in parts))
        sources = [np.ascontiguousarray(part.values, dtype).data for _, part, _ in parts]
        values = np.empty(int(offsets[-1]), dtype)
        for low in range(0, count, _JOINED_AT_ONCE):
            high = min(count, low + _JOINED_AT_ONCE)
            some = (origins[low:high].tolist(), firsts[low:high].tolist(), (firsts + lengths)[low:high].tolist())
            slices = [sources[origin][first:last] for origin, first, last in zip(*some, strict=True)]
            values[offsets[low] : offsets[high]] = join_slices(slices, dtype)
        return cls(values, offsets)


def python_values(array: pa.Array) -> list[Any]:
    """The values of an array as Python's objects, whether or not pandas is installed, whose times Arrow would take.

    Raises:
        ValueError: a time has nanoseconds, or a year, that Python's times lack.
    """
    kind = array.type
    held = _without_nanoseconds(kind)
    return list((array if held == kind else array.cast(held)).to_pylist())


@cache
def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    """The type with microseconds for nanoseconds, also inside of lists, structs and maps; itself if it has none."""
    if pa.types.is_map(kind):
        key, item = map(_without_nanoseconds, (kind.key_type, kind.item_type))
        return kind if (key, item) == (kind.key_type, kind.item_type) else pa.map_(key, item)
    if pa.types.is_struct(kind):
        fields = [kind.field(i).with_type(_without_nanoseconds(kind.field(i).type)) for i in range(kind.num_fields)]
        made: pa.DataType = pa.struct(fields)
        return kind if made == kind else made
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        inner = _without_nanoseconds(kind.value_type)
        if inner == kind.value_type:
            return kind
        field = kind.value_field.with_type(inner)
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(field, kind.list_size)
        return pa.large_list(field) if pa.types.is_large_list(kind) else pa.list_(field)
    if not pa.types.is_temporal(kind) or getattr(kind, "unit", "") != "ns":
        return kind
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", kind.tz)
    return pa.duration("us") if pa.types.is_duration(kind) else pa.time64("us")


def _exact_values(array: pa.Array) -> list[Any]:
    """The values of an array whose nanoseconds Python's times lack; raises ValueError as ``to_pylist`` where others do.

    Those that are whole microseconds are Python's as ever, others ``numpy.datetime64`` (UTC) or, of durations and times
    of a day, ``numpy.timedelta64``.
    """
    kind = array.type
    if pa.types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        rows = zip(*map(_exact_values, array.flatten()), strict=True)
        values: list[Any] = [dict(zip(names, row, strict=True)) for row in rows]
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        inner = _exact_values(array.values)
        if pa.types.is_map(kind):
            inner = [tuple(pair.values()) for pair in inner]
        offsets = array.offsets.to_pylist()
        values = [inner[start:stop] for start, stop in pairwise(offsets)]
    elif pa.types.is_fixed_size_list(kind):
        size = kind.list_size
        inner = _exact_values(array.values.slice(array.offset * size, len(array) * size))
        values = [inner[row * size : (row + 1) * size] for row in range(len(array))]
    elif pa.types.is_temporal(kind) and getattr(kind, "unit", "") == "ns":
        make = np.datetime64 if pa.types.is_timestamp(kind) else np.timedelta64
        numbers = array.cast(pa.int64()).to_pylist()
        whole = array.cast(_without_nanoseconds(kind), safe=False).to_pylist()
        pairs = zip(numbers, whole, strict=True)
        values = [n if n is None else v if n % 1000 == 0 else make(n, "ns") for n, v in pairs]
    else:
        values = array.to_pylist()
    if array.null_count:
        values = [
            None if is_null else value for is_null, value in zip(array.is_null().to_pylist(), values, strict=True)
        ]
    return values


def float_holds(value: int) -> bool:
    """Return whether float64 gives an integer back: as it is, or as one writes a float that has no fraction."""
    if -EXACT_INTEGERS <= value <= EXACT_INTEGERS:
        return True
    if abs(value) > _MOST_FLOAT64:
        return False
    number = float(value)
    return int(number) == value or Decimal(repr(number)) == value


def join_slices(slices: Iterable[memoryview], dtype: np.dtype[Any]) -> AnyArray:
    """Slices of arrays of ``dtype``, end to end, as an array of its own.

    For slices of some hundred numbers that is faster than indexing them. And where numpy would release the GIL for each
    slice and wait for it again, while other threads have it, this does so once at most.
    """
    return np.frombuffer(bytearray().join(slices), dtype)


Column = ArrayColumn | BytesColumn | ObjectColumn


@dataclass(frozen=True, slots=True)
class Records:
    """Scalar columns laid row by row: ``rows`` is (samples,) of opaque bytes, each made of ``names`` and ``dtypes``.

    All dtypes have the same item size. Formats return columns; the loader turns them into records.
    """

    names: tuple[str, ...]
    dtypes: tuple[np.dtype[Any], ...]
    rows: AnyArray


@dataclass(frozen=True, slots=True)
class Block:
    """An opened chunk: columns of ``samples`` values each, taking ``nbytes`` of memory in total."""

    samples: int
    nbytes: int
    columns: Mapping[str, Column] = field(default_factory=dict)
    records: tuple[Records, ...] = ()


_FEWEST = 4  # columns of one item size from which on it pays
_KINDS = "biuf"  # bool, integers, floats; other kinds have sizes that no integer has, or hold references
_TILE_BYTES = 256 << 10  # so that a tile lies in a core's own cache twice, and malloc has room for it


def pack_records(block: Block) -> Block:
    """The block with its scalar columns as records, wherever enough of them have the same item size."""
    by_size: dict[int, list[str]] = defaultdict(list)
    for name, column in block.columns.items():
        if isinstance(column, ArrayColumn) and column.values.ndim == 1 and column.values.dtype.kind in _KINDS:
            by_size[column.values.itemsize].append(name)
    packed = {size: names for size, names in by_size.items() if len(names) >= _FEWEST}
    if not packed:
        return block
    records = [
        Records(
            names=tuple(names),
            dtypes=tuple(_values(block, name).dtype for name in names),
            rows=_interleave([_values(block, name).view(f"u{size}") for name in names]),
        )
        for size, names in packed.items()
    ]
    inside = {name for names in packed.values() for name in names}
    columns = {name: column for name, column in block.columns.items() if name not in inside}
    return replace(block, columns=columns, records=tuple(records))


def unpack_records(records: Records, rows: AnyArray) -> Mapping[str, AnyArray]:
    """The columns of gathered ``rows`` (n,), each (n,) contiguous."""
    width = len(records.names)
    columns = np.empty((width, len(rows)), f"u{rows.itemsize // width}")
    fill_columns(columns, rows, np.arange(len(rows)))
    return {
        name: columns[i].view(dtype) for i, (name, dtype) in enumerate(zip(records.names, records.dtypes, strict=True))
    }


def fill_columns(columns: AnyArray, rows: AnyArray, order: IntArray) -> None:
    """Write records ``rows[order]`` as the columns (width, n) of one unsigned dtype, in tiles that a cache holds.

    ``rows`` may span more memory than may be read: no other rows are.
    """
    width = len(columns)
    tile = max(64, _TILE_BYTES // rows.itemsize)
    for start in range(0, len(order), tile):
        taken = rows[order[start : start + tile]]
        columns[:, start : start + tile] = taken.view(columns.dtype).reshape(-1, width).T


def _values(block: Block, name: str) -> AnyArray:
    column = block.columns[name]
    assert isinstance(column, ArrayColumn)
    return column.values


def _interleave(columns: list[AnyArray]) -> AnyArray:
    """Columns (n,) of one dtype as (n,) records of opaque bytes."""
    count, width, dtype = len(columns[0]), len(columns), columns[0].dtype
    rows: AnyArray = np.frombuffer(BUFFERS.take(count * width * dtype.itemsize), dtype).reshape(count, width)
    tile = max(64, _TILE_BYTES // (width * dtype.itemsize))
    room = np.empty(width * tile, dtype)
    for start in range(0, count, tile):
        stop = min(count, start + tile)
        of_tile = room[: width * (stop - start)]
        np.concatenate([column[start:stop] for column in columns], out=of_tile)
        rows[start:stop] = of_tile.reshape(width, -1).T
    return rows.view(f"V{width * dtype.itemsize}").reshape(count)
