"""Gathered rows of a span of batches, or of one: their ids, and the values of their fields, some still in chunks."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING, Any, Protocol, Self

import numpy as np

from ..columns import KEY_COLUMN, AnyArray, IntArray, Ragged, fill_columns
from ..errors import ConfigError, DecodeError
from ..reading.mapped import MappedFile, looking_at
from .batch_memory import BatchMemory, new_array
from .byte_views import ByteViews

if TYPE_CHECKING:
    from ..columns import Records
    from ..dataset.manifest import Manifest
    from ..order.spans import ChunkRows
    from .decode import FieldDecoder
    from .row_work import RowError


_TILE_BYTES = 1 << 20
# Of so many batches, or bytes of them, rows are copied at once: with each call numpy gives Python's lock away, and then
# waits for it. No more, since who keeps one of these batches keeps the memory of all.
MOST_TOGETHER, TOGETHER_BYTES = 4, 4 << 20
_MOST_BYTES = np.iinfo(np.intp).max  # of an array


class LateFields(Protocol):
    """Some fields of n rows. ``nbytes`` is their size once they are made.

    ``is_mapped``: they lie in files, so that they need no memory before. ``at``: where rows of arrays lie; None of
    Python values.
    """

    @property
    def names(self) -> Sequence[str]: ...

    @property
    def is_mapped(self) -> bool: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def at(self) -> RowsAt | None: ...

    def cut(self, start: int, stop: int) -> Self: ...

    def pick(self, rows: IntArray) -> Self: ...

    def mapped(self) -> Sequence[MappedFile]:
        """List the files that ``make`` copies from; to be called by a thread that is ``looking_at`` them."""

    def make(self, memory: BatchMemory | None) -> Mapping[str, AnyArray | list[Any]]:
        """Make the fields: arrays (n, ...) of their own, of ``memory`` if that is given, or lists of n."""


@dataclass(frozen=True, slots=True)
class RowsAt:
    """Rows that lie in chunks: row i is ``rows[places[i]]``, of an array on the memory of ``sources``.

    So one call of numpy copies a tile of rows from many chunks, without the GIL. Calls for each row would wait for it
    again and again, while other threads have it. Where sources are mapped, row i lies in ``files[origins[i]]``.
    """

    rows: AnyArray
    places: IntArray
    sources: Sequence[AnyArray] = ()
    origins: IntArray | None = None
    files: Sequence[MappedFile | None] = ()

    def __len__(self) -> int:
        return len(self.places)

    def pick(self, rows: IntArray | slice) -> RowsAt:
        origins = None if self.origins is None else self.origins[rows]
        return RowsAt(self.rows, self.places[rows], self.sources, origins, self.files)

    @property
    def nbytes(self) -> int:
        """Bytes of the rows where they lie."""
        return len(self.places) * math.prod(self.rows.shape[1:]) * self.rows.itemsize

    def mapped(self) -> list[MappedFile]:
        """List the files that these rows are mapped from."""
        found = [] if self.origins is None else map(self.files.__getitem__, set(self.origins.tolist()))
        return [file for file in found if file is not None]


class WideRows:
    """One field's wide rows."""

    is_mapped = False

    def __init__(self, name: str, at: RowsAt, dtype: np.dtype[Any]) -> None:
        """Keep rows to be handed out in ``dtype``."""
        self._name, self.at, self._dtype = name, at, dtype

    @property
    def names(self) -> Sequence[str]:
        return (self._name,)

    @property
    def nbytes(self) -> int:
        return len(self.at) * math.prod(self.at.rows.shape[1:]) * self._dtype.itemsize

    def cut(self, start: int, stop: int) -> WideRows:
        return WideRows(self._name, self.at.pick(slice(start, stop)), self._dtype)

    def pick(self, rows: IntArray) -> WideRows:
        return WideRows(self._name, self.at.pick(rows), self._dtype)

    def mapped(self) -> list[MappedFile]:
        return self.at.mapped()

    def is_like(self, other: WideRows) -> bool:
        """Return whether both are rows of one span's field."""
        return self._name == other._name and self.at.rows is other.at.rows and self._dtype == other._dtype

    @staticmethod
    def join(parts: Sequence[WideRows]) -> WideRows:
        """Join alike rows, one after another; the parts hold the sources."""
        first = parts[0]
        places = np.concatenate([part.at.places for part in parts])
        return WideRows(first._name, RowsAt(first.at.rows, places), first._dtype)

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        rows, places = self.at.rows, self.at.places
        shape = rows.shape[1:]
        out = new_array(memory, (len(places), *shape), self._dtype)
        tile = max(1, _TILE_BYTES // (rows.itemsize * math.prod(shape)))
        for start in range(0, len(out), tile):
            out[start : start + tile] = rows[places[start : start + tile]]
        return {self._name: out}


def make_all(parts: Sequence[Sequence[LateFields]], memory: BatchMemory | None) -> list[dict[str, Any]]:
    """Make the fields of several batches, wide rows of neighbours in one piece of memory, as far as that is small."""
    made: list[dict[str, Any]] = [{} for _ in parts]
    start = 0
    while start < len(parts):
        stop = start + _count_together(parts[start:])
        for of_field in zip(*parts[start:stop], strict=True):
            for fields, values in zip(made[start:stop], _make_together(of_field, memory), strict=True):
                fields.update(values)
        start = stop
    return made


def _count_together(parts: Sequence[Sequence[LateFields]]) -> int:
    """Count the first batches whose fields are made together."""
    if len(parts) == 1 or not all(isinstance(each, WideRows) for each in parts[0]):
        return 1
    count = nbytes = 0
    for late in islice(parts, MOST_TOGETHER):
        nbytes += sum(each.nbytes for each in late)
        are_alike = len(late) == len(parts[0]) and all(map(_are_alike, parts[0], late))
        if count and (nbytes > TOGETHER_BYTES or not are_alike):
            break
        count += 1
    return count


def _are_alike(one: LateFields, other: LateFields) -> bool:
    return isinstance(one, WideRows) and isinstance(other, WideRows) and one.is_like(other)


def _make_together(of_field: Sequence[LateFields], memory: BatchMemory | None) -> Iterator[Mapping[str, Any]]:
    first, *others = of_field
    if not others:
        yield first.make(memory)
        return
    wide = [late for late in of_field if isinstance(late, WideRows)]
    [(name, rows)] = WideRows.join(wide).make(memory).items()
    stops = list(accumulate(len(late.at) for late in wide))
    yield from ({name: rows[start:stop]} for start, stop in pairwise([0, *stops]))


class RecordRows:
    """Fields that lie in chunks as records."""

    is_mapped = False

    def __init__(self, records: Records, at: RowsAt, dtypes: Sequence[np.dtype[Any]]) -> None:
        """Keep rows laid out as ``records`` says, whose fields are handed out in ``dtypes``."""
        self._records, self.at, self._dtypes = records, at, dtypes

    @property
    def names(self) -> Sequence[str]:
        return self._records.names

    @property
    def nbytes(self) -> int:
        return len(self.at) * sum(dtype.itemsize for dtype in self._dtypes)

    def cut(self, start: int, stop: int) -> RecordRows:
        return RecordRows(self._records, self.at.pick(slice(start, stop)), self._dtypes)

    def pick(self, rows: IntArray) -> RecordRows:
        return RecordRows(self._records, self.at.pick(rows), self._dtypes)

    def mapped(self) -> list[MappedFile]:
        return self.at.mapped()

    def make(self, memory: BatchMemory | None) -> dict[str, AnyArray]:
        records, width = self._records, len(self._records.names)
        unit = np.dtype(f"u{self.at.rows.itemsize // width}")
        columns = new_array(memory, (width, len(self.at)), unit)
        fill_columns(columns, self.at.rows, self.at.places)
        fields: dict[str, AnyArray] = {}
        for name, dtype, wanted, column in zip(records.names, records.dtypes, self._dtypes, columns, strict=True):
            values = column.view(dtype)
            fields[name] = values if dtype is wanted else values.astype(wanted, copy=False)
        return fields


class RowsOfSpan:
    """Collects where rows of one shape lie, chunk by chunk."""

    def __init__(self, like: AnyArray, num_rows: int) -> None:
        self._like: AnyArray = np.empty((0, *like.shape[1:]), like.dtype)
        self._num_rows = num_rows
        self._parts: list[_Part] = []

    def add(self, source: AnyArray, group: ChunkRows, file: MappedFile | None = None) -> None:
        """Add the rows of ``group``; ``source`` is (samples, ...) of a dtype that may differ from the first one's.

        ``file``: the one that it is mapped from.
        """
        part = _Part(source, group.rows, group.targets, file)
        if source.dtype != self._like.dtype or source.strides[0] < 0 or not source[:1].flags.c_contiguous:
            part = part.copy(self._like.dtype)
        self._parts.append(part)

    def finish(self) -> RowsAt:
        """Collect all rows. Those that no group gave, of chunks without the field, are arbitrary."""
        return self._span() or self._copy()

    def _span(self) -> RowsAt | None:
        """Find places in one array of rows that begins with the lowest source and spans all.

        Its rows overlap, so that one begins wherever one of a source does, and lie between the sources, too, where
        memory may belong to others: only rows at the places may be read, while the sources are held. None where it
        would be larger than numpy allows.
        """
        starts: list[int] = [part.source.__array_interface__["data"][0] for part in self._parts]
        first = min(starts)
        lowest = self._parts[starts.index(first)]
        # The largest step in which each row begins.
        widths = (part.source.strides[0] for part in self._parts)
        step = math.gcd(*(start - first for start in starts), *widths) or 1
        places = np.zeros(self._num_rows, np.int64)
        for start, part in zip(starts, self._parts, strict=True):
            places[part.targets] = part.rows * (part.source.strides[0] // step) + (start - first) // step
        count = int(places.max()) + 1
        if count * max(1, lowest.source[:1].nbytes) > _MOST_BYTES:
            return None
        shape, strides = (count, *lowest.source.shape[1:]), (step, *lowest.source.strides[1:])
        spanning = np.lib.stride_tricks.as_strided(lowest.source, shape, strides, writeable=False)
        return RowsAt(spanning, places, [part.source for part in self._parts], *self._files(lowest.file))

    def _files(self, default: MappedFile | None) -> tuple[IntArray | None, list[MappedFile | None]]:
        """Find the file in which each row lies; ``default`` is that of rows that no group has given."""
        numbers = {file: number for number, file in enumerate(dict.fromkeys([default, *(p.file for p in self._parts)]))}
        if list(numbers) == [None]:
            return None, []
        origins = np.zeros(self._num_rows, np.int64)
        for part in self._parts:
            origins[part.targets] = numbers[part.file]
        return origins, list(numbers)

    def _copy(self) -> RowsAt:
        """Copy the rows into memory of their own, in order."""
        copied: AnyArray = np.empty((self._num_rows, *self._like.shape[1:]), self._like.dtype)
        for part in self._parts:
            copied[part.targets] = part.copy(self._like.dtype).source
        return RowsAt(copied, np.arange(self._num_rows))


@dataclass(frozen=True, slots=True)
class _Part:
    """Rows of ``source``, and where they belong."""

    source: AnyArray
    rows: IntArray
    targets: IntArray
    file: MappedFile | None

    def copy(self, dtype: np.dtype[Any]) -> _Part:
        """Copy the rows into memory of their own, in order."""
        with looking_at([] if self.file is None else [self.file], len(self.rows)):
            copied = np.ascontiguousarray(self.source[self.rows], dtype)
        return _Part(copied, np.arange(len(copied)), self.targets, None)


# Where fewer are copied from a mapped file at once, asking for the file costs more than reading it.
_LEAST_LOOK_BYTES = 64 << 10
_IMAGE_GROWTH = 10  # pixels take about this many times the bytes of the encoded image
_SIZED = {bytes, memoryview, str}


Values = AnyArray | ByteViews | Ragged | list[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Gathered rows: ``ids`` (n,) int64 sample ids, and each field's values, an array (n, ...) or a list of n.

    ``planned``: (n,) the ids that the order asked for, where others take the place of some; None where it is ``ids``.
    ``epochs``: (n,) int64 the epoch of each row's source, where rows of several sources may differ in it.
    ``late``: fields that are still in their chunks, which these keep in memory, until ``complete`` copies them.
    ``names``: where those have places among the others, all of both in the order of batches.
    """

    ids: IntArray
    fields: Mapping[str, Values]
    planned: IntArray | None = None
    late: Sequence[LateFields] = ()
    names: Sequence[str] = ()
    epochs: IntArray | None = None

    @property
    def keeps_chunks(self) -> bool:
        """Return whether chunks must stay in memory until these are copied."""
        return not all(late.is_mapped for late in self.late)

    @property
    def planned_ids(self) -> IntArray:
        """(n,) int64: the ids that the order asked for."""
        return self.ids if self.planned is None else self.planned

    def cut(self, start: int, stop: int) -> Rows:
        fields = {name: _cut(values, start, stop) for name, values in self.fields.items()}
        planned = None if self.planned is None else self.planned[start:stop]
        late = [each.cut(start, stop) for each in self.late]
        epochs = None if self.epochs is None else self.epochs[start:stop]
        return Rows(self.ids[start:stop], fields, planned, late, self.names, epochs)

    def pick(self, indices: Sequence[int]) -> Rows:
        """Pick some rows, in any order and more than once, with values of their own: a transform may change each."""
        fields = {name: _pick(values, indices) for name, values in self.fields.items()}
        rows = np.asarray(indices, np.int64)
        planned = None if self.planned is None else self.planned[rows]
        epochs = None if self.epochs is None else self.epochs[rows]
        return Rows(self.ids[rows], fields, planned, [late.pick(rows) for late in self.late], self.names, epochs)

    def complete(self, memory: BatchMemory | None = None) -> Rows:
        """Copy the late fields, into arrays of ``memory`` if that is given; any thread may ask."""
        return complete_all([self], memory)[0]

    def _with(self, made: Mapping[str, Values]) -> Rows:
        """Replace the late fields by their copies."""
        if not self.late:
            return self
        fields = {**made, **self.fields}
        fields = {name: fields[name] for name in self.names or fields}
        return Rows(self.ids, fields, self.planned, epochs=self.epochs)

    def stay_in_chunks(self, decoders: Mapping[str, FieldDecoder | None]) -> bool:
        """Return whether three quarters or more take no memory of their own yet: they lie in chunks, or are views."""
        kept = sum(late.nbytes for late in self.late)
        kept += sum(v.nbytes for v in self.fields.values() if isinstance(v, ByteViews) and v.are_shared)
        return kept > 0 and 4 * kept >= 3 * self.count_bytes(decoders)

    def count_bytes(self, decoders: Mapping[str, FieldDecoder | None]) -> int:
        """Count the bytes of the rows and of their values once decoded.

        Of lists of Python values, only those that have a length in bytes are counted.
        """
        total = sum(late.nbytes for late in self.late)
        for name, values in self.fields.items():
            if not isinstance(values, list):
                total += values.nbytes
                continue
            sized = values if set(map(type, values)) <= _SIZED else [value for value in values if type(value) in _SIZED]
            encoded = sum(map(len, sized))
            total += encoded
            decoder = decoders.get(name)
            if decoder is not None and decoder.slot is not None:
                shape, dtype = decoder.slot
                total += len(values) * math.prod(shape) * np.dtype(dtype).itemsize
            elif decoder is not None and decoder.is_image:
                total += _IMAGE_GROWTH * encoded
        return total


def complete_all(parts: Sequence[Rows], memory: BatchMemory | None = None) -> list[Rows]:
    """``Rows.complete`` of each, asking once for all whether the files that they are mapped from are as they were.

    Raises:
        ObjectChangedError, NotFoundError: one of the files is not.
    """
    late = [each for rows in parts for each in rows.late]
    files = {id(file): file for each in late for file in each.mapped()}.values()  # those of a span are of one list
    places = [each.at for each in late if each.at is not None]
    values = sum(len(rows.ids) * len(rows.late) for rows in parts)
    is_little = len(places) == len(late) and sum(at.nbytes for at in places) < _LEAST_LOOK_BYTES * len(files)
    with looking_at(files, values, in_vain=values if is_little else 0):
        made = make_all([rows.late for rows in parts], memory)
    return [rows._with(fields) for rows, fields in zip(parts, made, strict=True)]


def _cut(values: Values, start: int, stop: int) -> Values:
    return values.cut(start, stop) if isinstance(values, Ragged) else values[start:stop]


def _pick(values: Values, rows: Sequence[int]) -> Values:
    if isinstance(values, ByteViews):
        return values.pick(rows)
    if isinstance(values, Ragged):
        return values.take(np.asarray(rows, np.int64))
    return values[list(rows)] if isinstance(values, np.ndarray) else [copy_value(values[i]) for i in rows]


def copy_value(value: Any) -> Any:
    """Copy an array, a tensor, or a list, tuple, dict, set or bytearray, with all of these in it; others stay."""
    torch = sys.modules.get("torch")  # who has no tensors need not wait for it
    if isinstance(value, np.ndarray):
        return value.copy()
    if torch is not None and isinstance(value, torch.Tensor):
        return value.clone()
    if type(value) in (list, tuple):
        return type(value)(map(copy_value, value))
    if type(value) is dict:
        return copy_sample(value)
    return type(value)(value) if type(value) in (set, bytearray) else value


def copy_sample(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Copy a sample by ``copy_value`` of each field."""
    return {name: copy_value(value) for name, value in sample.items()}


def explain_row_error(error: RowError, rows: Rows, manifest: Manifest) -> Exception:
    """Make the error that users see: ours name the sample; those of a transform keep their type and get a note."""
    where, cause = describe_row(error.row, rows, manifest), error.cause
    if error.step != "transform" and isinstance(cause, DecodeError | ConfigError):
        kind = DecodeError if isinstance(cause, DecodeError) else ConfigError
        explained: Exception = kind(f"{where}: {cause}")
        explained.__cause__ = cause
        return explained
    cause.add_note(f"in {'transform=' if error.step == 'transform' else 'decoding'} of {where}")
    return cause


def describe_row(row: int, rows: Rows, manifest: Manifest) -> str:
    """Describe a row's sample for people: its id, its place in its shard, and its key where it has one."""
    sample_id = int(rows.ids[row])
    shard, number = manifest.shard_of(sample_id)
    key = rows.fields.get(KEY_COLUMN)
    named = f", key {key[row]!r}" if key is not None else ""
    return f"{manifest.name_sample(sample_id)} (number {number} of {shard}{named})"
