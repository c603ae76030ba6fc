"""Rows of opened chunks, put in order of delivery by whole columns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..columns import AnyArray, ArrayColumn, Block, BytesColumn, IntArray, ObjectColumn, Ragged, Records
from ..errors import DecodeError
from ..order.spans import ChunkRows
from ..reading.mapped_chunks import LEAST_ROW_BYTES, MappedArray, MappedColumn
from ..reading.mapped_files import MappedFile, looking_at
from .batch_memory import BatchMemory
from .byte_views import ByteViews, Lend, ViewsOfSpan, take_views
from .copies import copy_value
from .decode import FieldDecoder, FieldDecoders
from .late_bytes import LateBytesOfSpan
from .late_rows import LateFields, RecordRows, RowsAt, RowsOfSpan, WideRows, make_all

# Where fewer are copied from a mapped file at once, asking for the file costs more than reading it.
_LEAST_LOOK_BYTES = 64 << 10
_IMAGE_GROWTH = 10  # pixels take about this many times the bytes of the encoded image
_SIZED = {bytes, memoryview, str}


Values = AnyArray | ByteViews | Ragged | list[Any]


@dataclass(frozen=True, slots=True)
class Rows:
    """Gathered rows: ``ids`` (n,) int64 sample ids, and each field's values, an array (n, ...) or a list of n.

    ``planned``: (n,) the ids that the order asked for, where others take the place of some; None where it is ``ids``.
    ``late``: fields that are still in their chunks, which these keep in memory, until ``complete`` copies them.
    ``names``: where those have places among the others, all of both in the order of batches.
    """

    ids: IntArray
    fields: Mapping[str, Values]
    planned: IntArray | None = None
    late: Sequence[LateFields] = ()
    names: Sequence[str] = ()

    @property
    def keep_chunks(self) -> bool:
        """Whether chunks must stay in memory until these are copied."""
        return not all(late.is_mapped for late in self.late)

    @property
    def planned_ids(self) -> IntArray:
        """(n,) int64: the ids that the order asked for."""
        return self.ids if self.planned is None else self.planned

    def cut(self, start: int, stop: int) -> Rows:
        fields = {name: _cut(values, start, stop) for name, values in self.fields.items()}
        planned = None if self.planned is None else self.planned[start:stop]
        late = [each.cut(start, stop) for each in self.late]
        return Rows(self.ids[start:stop], fields, planned, late, self.names)

    def pick(self, indices: Sequence[int]) -> Rows:
        """Some rows, in any order and more than once, with values of their own: a transform may change each."""
        fields = {name: _pick(values, indices) for name, values in self.fields.items()}
        rows = np.asarray(indices, np.int64)
        planned = None if self.planned is None else self.planned[rows]
        return Rows(self.ids[rows], fields, planned, [late.pick(rows) for late in self.late], self.names)

    def complete(self, memory: BatchMemory | None = None) -> Rows:
        """The same rows with the late fields copied, into arrays of ``memory`` if that is given; any thread may ask."""
        return complete_all([self], memory)[0]

    def _with(self, made: Mapping[str, Values]) -> Rows:
        """The same rows with the late fields, as they were made."""
        if not self.late:
            return self
        fields = {**made, **self.fields}
        return Rows(self.ids, {name: fields[name] for name in self.names or fields}, self.planned)

    def count_bytes(self, decoders: Mapping[str, FieldDecoder | None]) -> int:
        """Bytes of the rows and of what they will be decoded into.

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
    places = [late.at for rows in parts for late in rows.late if late.at is not None]
    files = {id(file): file for at in places for file in at.mapped()}.values()  # those of a span are of one list
    copied = sum(map(len, places)), sum(at.nbytes for at in places)
    with looking_at(files, copied[0], nbytes=copied[1], least_bytes=_LEAST_LOOK_BYTES):
        made = make_all([rows.late for rows in parts], memory)
    return [rows._with(fields) for rows, fields in zip(parts, made, strict=True)]


def gather(
    groups: Iterable[tuple[ChunkRows, Block]],
    num_rows: int,
    first_ids: IntArray,
    decoders: FieldDecoders,
    lend: Lend | None = None,
    flat: Collection[str] = (),
    *,
    memory: BatchMemory | None = None,
) -> Rows:
    """Gather rows of opened chunks in order of delivery; each column of each chunk is touched once.

    Where the decoders want views, ``lend`` says which chunks' bytes batches may keep; others are copied. Lists of
    integers in fields named ``flat`` come as ``Ragged``, without a Python object a value.

    Values are stored in the order in which chunks arrive and reordered at the end, all at once. Of wide rows only the
    places are noted; they, and records, are copied and converted at the end. With ``memory`` only the places of records
    and of raw bytes in files are noted, too, and all that is left to who calls ``Rows.complete``.
    """
    ids = np.empty(num_rows, np.int64)
    replaced: list[ChunkRows] = []
    arrived: list[IntArray] = []  # where the rows belong, in the order of arrival
    wide: dict[str, RowsOfSpan] = {}
    narrow: dict[str, AnyArray] = {}
    lists: dict[str, list[Any]] = {}
    in_files: dict[str, LateBytesOfSpan] = {}  # of fields that have a list, too
    views: dict[str, ViewsOfSpan] = {}
    ragged: dict[str, list[tuple[int, Ragged, ChunkRows]]] = {}  # with the number of rows that arrived before
    records: list[tuple[Records, AnyArray | RowsOfSpan]] = []  # copied in the order of arrival, or noted
    viewed: set[MappedFile] = set()
    done = 0
    for group, block in groups:
        stop = done + len(group.rows)
        arrived.append(group.targets)
        ids[group.targets] = group.rows + first_ids[group.chunk]
        if group.stands_for is not None:
            replaced.append(group)
        for name, column in block.columns.items():
            if isinstance(column, MappedColumn) and decoders.raw == "view":
                viewed.add(column.file)
            is_raw = isinstance(column, BytesColumn) and not column.text and decoders.of(name, column) is None
            if isinstance(column, BytesColumn) and is_raw and decoders.raw == "view":
                of_field = views.setdefault(name, ViewsOfSpan())
                of_field.pad(done)
                of_field.add(column, group.rows, lend)
                continue
            if isinstance(column, MappedColumn) and is_raw and memory is not None:
                lists.setdefault(name, [])
                in_files.setdefault(name, LateBytesOfSpan()).add(column, group)
                continue
            if isinstance(column, ObjectColumn) and name in flat:
                arrays = column.as_ragged()
                if arrays is not None:
                    ragged.setdefault(name, []).append((done, arrays, group))
                    continue
            if not isinstance(column, ArrayColumn):
                values = lists.setdefault(name, [])
                values.extend([None] * (done - len(values)))  # earlier chunks had no such field
                # Text columns have a decoder too, if the user named one: it is called with str.
                is_encoded = isinstance(column, BytesColumn) and decoders.of(name, column) is not None
                if isinstance(column, BytesColumn) and is_encoded and not column.text:
                    as_views = decoders.raw == "view"
                    values.extend(take_views(column, group.rows, lend) if as_views else column.copies(group.rows))
                else:
                    values.extend(_take(column, name, group))
                continue
            source = column.values
            file = column.file if isinstance(column, MappedArray) else None
            if file is not None or source.itemsize * math.prod(source.shape[1:]) >= LEAST_ROW_BYTES:
                if name not in wide:
                    wide[name] = RowsOfSpan(source, num_rows)
                wide[name].add(source, group, file)
            else:
                # numpy's take would first copy all of an array that is not contiguous
                taken = source.take(group.rows, axis=0) if source.flags.c_contiguous else source[group.rows]
                _array(narrow, name, source, num_rows, decoders)[done:stop] = taken
        for i, packed in enumerate(block.records):
            if i == len(records):
                like = packed.rows
                room = np.empty(num_rows, like.dtype) if memory is None else RowsOfSpan(like, num_rows)
                records.append((packed, room))
            assert packed.rows.dtype == records[i][0].rows.dtype, "chunks of one data set have the same records"
            if isinstance(room := records[i][1], RowsOfSpan):
                room.add(packed.rows, group)
            else:
                packed.rows.take(group.rows, out=room[done:stop], mode="clip")  # "raise" would copy twice
        done = stop
    for file in viewed:
        file.check()
    is_late = not (narrow or lists or views or ragged) and all(isinstance(room, RowsOfSpan) for _, room in records)
    order = np.empty(0 if is_late else num_rows, np.int64)
    if not is_late:
        order[np.concatenate(arrived)] = np.arange(num_rows)
    due: list[LateFields] = []
    for name, of_span in wide.items():
        at = of_span.finish()
        due.append(WideRows(name, at, decoders.dtype_of(at.rows)))
    for packed, room in records:
        at = room.finish() if isinstance(room, RowsOfSpan) else RowsAt(room, order)
        due.append(RecordRows(packed, at, [decoders.dtype_of(np.empty(0, kind)) for kind in packed.dtypes]))
    fields: dict[str, Values] = {}
    fields |= {name: values.take(order, axis=0) for name, values in narrow.items()}
    names = [name for late in due for name in late.names] if in_files else []
    for name, parts in ragged.items():
        if name not in lists and sum(len(group.rows) for _, _, group in parts) == num_rows:
            fields[name] = Ragged.merge(num_rows, [(group.targets, part, group.rows) for _, part, group in parts])
            continue
        values = lists.setdefault(name, [])  # some chunks have others
        values.extend([None] * (num_rows - len(values)))
        for start, part, group in parts:
            values[start : start + len(group.rows)] = map(part.__getitem__, group.rows.tolist())
    for name, values in lists.items():
        if name in in_files:
            due.append(in_files[name].finish(name, order, values))
            continue
        values.extend([None] * (num_rows - len(values)))
        fields[name] = list(map(values.__getitem__, order.tolist()))
    for name, of_field in views.items():
        of_field.pad(num_rows)
        fields[name] = of_field.finish(order)
    if in_files:
        names += dict.fromkeys([*narrow, *ragged, *lists, *views])
    rows = Rows(ids, fields, _planned(ids, replaced), due, names)
    return rows.complete() if memory is None else rows


def _planned(ids: IntArray, replaced: Sequence[ChunkRows]) -> IntArray | None:
    if not replaced:
        return None
    planned = ids.copy()
    for group in replaced:
        planned[group.targets] = group.stands_for
    return planned


def _cut(values: Values, start: int, stop: int) -> Values:
    return values.cut(start, stop) if isinstance(values, Ragged) else values[start:stop]


def _pick(values: Values, rows: Sequence[int]) -> Values:
    if isinstance(values, ByteViews):
        return values.pick(rows)
    if isinstance(values, Ragged):
        return values.take(np.asarray(rows, np.int64))
    return values[list(rows)] if isinstance(values, np.ndarray) else [copy_value(values[i]) for i in rows]


def _take(column: BytesColumn | ObjectColumn, name: str, group: ChunkRows) -> list[Any]:
    try:
        return column.take(group.rows)
    except UnicodeDecodeError as exc:
        raise DecodeError(
            f"field {name!r} of chunk {group.chunk}: text that is not UTF-8 ({exc}); read it raw with decode=None, or "
            "leave it out with columns="
        ) from exc


def _array(arrays: dict[str, AnyArray], name: str, like: AnyArray, num_rows: int, decoders: FieldDecoders) -> AnyArray:
    if name not in arrays:
        arrays[name] = np.empty((num_rows, *like.shape[1:]), decoders.dtype_of(like))
    return arrays[name]
