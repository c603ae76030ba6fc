"""Rows of opened chunks, put in order of delivery by whole columns."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ..columns import AnyArray, ArrayColumn, Block, BytesColumn, IntArray, ObjectColumn, Ragged, Records
from ..errors import DecodeError
from ..order.cached import cached_property
from ..reading.mapped import LEAST_ROW_BYTES, MappedArray, MappedColumn
from .batch_memory import BatchMemory, new_array
from .byte_views import Lend, ViewsOfSpan, take_views
from .rows import LateFields, RecordRows, Rows, RowsAt, RowsOfSpan, Values, WideRows

if TYPE_CHECKING:
    from ..order.spans import ChunkRows
    from ..reading.mapped import MappedFile
    from .decode import FieldDecoders


class ArrayOfSpan:
    """Collects rows of one shape by copying them."""

    def __init__(self, like: AnyArray, num_rows: int, dtype: np.dtype[Any]) -> None:
        """Make room for rows of ``like``'s shape, to be handed out in ``dtype``."""
        self._values: AnyArray = np.empty((num_rows, *like.shape[1:]), dtype)

    def add(self, source: AnyArray, rows: IntArray, arrived: int) -> None:
        """Add some rows of ``source``, after ``arrived`` others."""
        # numpy's take would first copy all of an array that is not contiguous
        taken = source.take(rows, axis=0) if source.flags.c_contiguous else source[rows]
        self._values[arrived : arrived + len(rows)] = taken

    def finish(self, order: IntArray, memory: BatchMemory | None) -> AnyArray:
        """Put all rows in order: row i is the ``order[i]``-th that arrived; into ``memory``, if that is given."""
        out = new_array(memory, self._values.shape, self._values.dtype)
        return self._values.take(order, axis=0, out=out, mode="clip")  # "raise" would copy twice


class ListOfSpan:
    """Collects Python values; ``so_far`` are those in the order of arrival, up to the last that was added."""

    def __init__(self) -> None:
        self.so_far: list[Any] = []

    def pad(self, count: int) -> None:
        """Add missing values until there are ``count``: earlier chunks had no such field."""
        self.so_far.extend([None] * (count - len(self.so_far)))

    def add(self, values: list[Any], arrived: int) -> None:
        """Add values of rows that come after ``arrived`` others."""
        self.pad(arrived)
        self.so_far.extend(values)

    def finish(self, order: IntArray) -> list[Any]:
        """Put all values in order: value i is that of the ``order[i]``-th row that arrived."""
        self.pad(len(order))
        return list(map(self.so_far.__getitem__, order.tolist()))


class RaggedOfSpan:
    """Collects lists of integers, without a Python object a value, where they lie in chunks."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, Ragged, ChunkRows]] = []
        self.count = 0

    def add(self, arrays: Ragged, group: ChunkRows, arrived: int) -> None:
        """Add the rows of ``group``, after ``arrived`` others."""
        self._parts.append((arrived, arrays, group))
        self.count += len(group.rows)

    def finish(self) -> Ragged:
        """Join all ``count`` values, where no row lacks its own."""
        return Ragged.merge(self.count, [(group.targets, arrays, group.rows) for _, arrays, group in self._parts])

    def put_into(self, listed: ListOfSpan, num_rows: int) -> None:
        """Put them into the places of their rows, among values that are missing or no lists of integers."""
        listed.pad(num_rows)
        for arrived, arrays, group in self._parts:
            listed.so_far[arrived : arrived + len(group.rows)] = map(arrays.__getitem__, group.rows.tolist())


@dataclass(frozen=True, slots=True)
class LateBytes:
    """A field of n rows: value i is ``columns[origins[i]].buffer[starts[i]:stops[i]]``, missing where starts[i] < 0.

    ``origins``, ``starts``, ``stops``: (n,) int64. Of those that lie elsewhere, and are made already, origins[i] is -1,
    and value i is ``made[starts[i]]``. The files stay mapped as long as this refers to them.
    """

    is_mapped: ClassVar[bool] = True
    at: ClassVar[None] = None

    name: str
    columns: Sequence[MappedColumn]
    origins: IntArray
    starts: IntArray
    stops: IntArray
    made: Sequence[Any] = ()

    @property
    def names(self) -> Sequence[str]:
        return (self.name,)

    @property
    def nbytes(self) -> int:
        """Bytes of the values once made, without those of their objects."""
        return int((self.stops - self.starts)[self.starts >= 0].sum())

    def cut(self, start: int, stop: int) -> LateBytes:
        return self.pick(slice(start, stop))

    def pick(self, rows: IntArray | slice) -> LateBytes:
        at = (self.origins[rows], self.starts[rows], self.stops[rows])
        return LateBytes(self.name, self.columns, *at, self.made)

    def make(self, memory: object = None) -> dict[str, list[Any]]:
        """Make the field, as a list; objects lie in the interpreter's memory."""
        made, buffers = self.made, [column.buffer for column in self.columns]
        places = zip(self.origins.tolist(), self.starts.tolist(), self.stops.tolist(), strict=True)
        values = [(buffers[i][a:b].tobytes() if i >= 0 else made[a]) if a >= 0 else None for i, a, b in places]
        return {self.name: values}

    def mapped(self) -> list[MappedFile]:
        """List the files that values are copied from."""
        return [self.columns[i].file for i in set(self.origins.tolist()) if i >= 0]


class LateBytesOfSpan:
    """Collects where a field's values lie, chunk by chunk."""

    def __init__(self) -> None:
        self._parts: list[tuple[MappedColumn, ChunkRows]] = []

    def add(self, column: MappedColumn, group: ChunkRows) -> None:
        """Add the rows of ``group``."""
        self._parts.append((column, group))

    def finish(self, name: str, order: IntArray, made: Sequence[Any]) -> LateBytes:
        """Collect all rows: value i is ``made[order[i]]``, except where an added one takes its place.

        ``made`` may be shorter; values that are in neither are missing.
        """
        origins, stops = np.full((2, len(order)), -1, np.int64)
        starts = np.where(order < len(made), order, -1)
        for number, (column, group) in enumerate(self._parts):
            origins[group.targets] = number
            starts[group.targets], stops[group.targets] = column.starts[group.rows], column.stops[group.rows]
        others = np.flatnonzero((origins < 0) & (starts >= 0))
        sizes = [len(v) if isinstance(v := made[i], bytes | memoryview | str) else 0 for i in starts[others].tolist()]
        stops[others] = starts[others] + sizes
        return LateBytes(name, [column for column, _ in self._parts], origins, starts, stops, made)


def gather(
    groups: Iterable[tuple[ChunkRows, Block]],
    num_rows: int,
    first_ids: IntArray,
    decoders: FieldDecoders,
    lend: Lend | None = None,
    flat: Collection[str] = (),
    *,
    memory: BatchMemory | None = None,
    epochs: IntArray | None = None,
) -> Rows:
    """Gather rows of opened chunks in order of delivery; each column of each chunk is touched once.

    Where the decoders want views, ``lend`` says which chunks' bytes batches may keep; others are copied. Lists of
    integers in fields named ``flat`` come as ``Ragged``, without a Python object a value. With ``memory``, what can be
    copied late is left to who calls ``Rows.complete``, and other arrays lie there. ``epochs``: see ``Rows``.
    """
    ids = np.empty(num_rows, np.int64)
    replaced: list[ChunkRows] = []
    fields = FieldsOfSpan(num_rows, decoders, lend, flat, memory=memory)
    for group, block in groups:
        ids[group.targets] = group.rows + first_ids[group.chunk]
        if group.stands_for is not None:
            replaced.append(group)
        fields.add(block, group)
    rows = fields.finish(ids, _planned(ids, replaced), epochs)
    return rows.complete() if memory is None else rows


class FieldsOfSpan:
    """Collects all fields of a span's rows, chunk by chunk: for each field one collector a kind of column.

    Of records and wide rows only the places are noted, and they are copied and converted late, as are raw bytes in
    mapped files with ``memory``; without it, records are copied at once.
    A field may be of one kind in some chunks and of another in others, or in some chunks alone.
    """

    def __init__(
        self,
        num_rows: int,
        decoders: FieldDecoders,
        lend: Lend | None,
        flat: Collection[str],
        *,
        memory: BatchMemory | None,
    ) -> None:
        self._num_rows = num_rows
        self._decoders = decoders
        self._lend = lend
        self._flat = flat
        self._memory = memory
        self._is_late = memory is not None
        self._as_views = decoders.raw == "view"
        self._arrived = 0  # rows of the chunks so far
        self._targets: list[IntArray] = []  # where these belong
        self._wide: dict[str, RowsOfSpan] = {}
        self._records: list[tuple[Records, AnyArray | RowsOfSpan]] = []  # copied in the order of arrival, or noted
        self._narrow: dict[str, ArrayOfSpan] = {}
        self._ragged: dict[str, RaggedOfSpan] = {}
        self._lists: dict[str, ListOfSpan] = {}
        self._in_files: dict[str, LateBytesOfSpan] = {}  # of fields that have a list, too
        self._views: dict[str, ViewsOfSpan] = {}
        self._viewed: set[MappedFile] = set()

    def add(self, block: Block, group: ChunkRows) -> None:
        """Add the rows of ``group``, which lie in ``block``."""
        for name, column in block.columns.items():
            if isinstance(column, ArrayColumn):
                self._add_array(name, column, group)
            elif isinstance(column, BytesColumn):
                self._add_bytes(name, column, group)
            else:
                self._add_objects(name, column, group)
        for number, records in enumerate(block.records):
            self._add_records(number, records, group)
        self._targets.append(group.targets)
        self._arrived += len(group.rows)

    def _add_array(self, name: str, column: ArrayColumn, group: ChunkRows) -> None:
        source = column.values
        file = column.file if isinstance(column, MappedArray) else None
        if file is not None or source.itemsize * math.prod(source.shape[1:]) >= LEAST_ROW_BYTES:
            if name not in self._wide:
                self._wide[name] = RowsOfSpan(source, self._num_rows)
            self._wide[name].add(source, group, file)
            return
        if name not in self._narrow:
            self._narrow[name] = ArrayOfSpan(source, self._num_rows, self._decoders.dtype_of(source))
        self._narrow[name].add(source, group.rows, self._arrived)

    def _add_bytes(self, name: str, column: BytesColumn, group: ChunkRows) -> None:
        if isinstance(column, MappedColumn) and self._as_views:
            self._viewed.add(column.file)
        decoder = self._decoders.of(name, column)
        if column.text:  # text has a decoder too, if the user named one: it is called with str
            self._list(name).add(_take(name, column, group), self._arrived)
        elif decoder is not None:
            self._list(name).add(self._encoded(column, group), self._arrived)
        elif self._as_views:
            views = self._views.setdefault(name, ViewsOfSpan())
            views.pad(self._arrived)
            views.add(column, group.rows, self._lend)
        elif isinstance(column, MappedColumn) and self._is_late:
            self._list(name)
            self._in_files.setdefault(name, LateBytesOfSpan()).add(column, group)
        else:
            self._list(name).add(column.take(group.rows), self._arrived)

    def _encoded(self, column: BytesColumn, group: ChunkRows) -> list[memoryview | None]:
        return take_views(column, group.rows, self._lend) if self._as_views else column.copies(group.rows)

    def _add_objects(self, name: str, column: ObjectColumn, group: ChunkRows) -> None:
        decoder = self._decoders.of(name, column)
        arrays = column.as_ragged() if name in self._flat and decoder is None else None
        if arrays is not None:
            self._ragged.setdefault(name, RaggedOfSpan()).add(arrays, group, self._arrived)
        else:
            self._list(name).add(_take(name, column, group), self._arrived)

    def _list(self, name: str) -> ListOfSpan:
        found = self._lists.get(name)
        if found is None:
            found = self._lists[name] = ListOfSpan()
        return found

    def _add_records(self, number: int, records: Records, group: ChunkRows) -> None:
        source = records.rows
        if number == len(self._records):
            noted = RowsOfSpan(source, self._num_rows) if self._is_late else np.empty(self._num_rows, source.dtype)
            self._records.append((records, noted))
        first, room = self._records[number]
        assert source.dtype == first.rows.dtype, "chunks of one data set have the same records"
        if isinstance(room, RowsOfSpan):
            room.add(source, group)
        else:
            out = room[self._arrived : self._arrived + len(group.rows)]
            source.take(group.rows, out=out, mode="clip")  # "raise" would copy twice

    def finish(self, ids: IntArray, planned: IntArray | None, epochs: IntArray | None = None) -> Rows:
        """Put all rows in order; these are their ids, and the epochs of their sources.

        Raises:
            ObjectChangedError, NotFoundError: a file that views are of is not as it was when it was indexed.
        """
        for file in self._viewed:
            file.check()
        late = [*self._late_rows()]
        names = [name for of_rows in late for name in of_rows.names]
        fields: dict[str, Values] = {
            name: array.finish(self._order, self._memory) for name, array in self._narrow.items()
        }
        for name, ragged in self._ragged.items():
            if name not in self._lists and ragged.count == self._num_rows:
                fields[name] = ragged.finish()
            else:
                ragged.put_into(self._list(name), self._num_rows)
        for name, listed in self._lists.items():
            if name in self._in_files:
                late.append(self._in_files[name].finish(name, self._order, listed.so_far))
            else:
                fields[name] = listed.finish(self._order)
        for name, views in self._views.items():
            views.pad(self._num_rows)
            fields[name] = views.finish(self._order)
        names += dict.fromkeys([*self._narrow, *self._ragged, *self._lists, *self._views])
        return Rows(ids, fields, planned, late, names if self._in_files else [], epochs)

    def _late_rows(self) -> Iterator[LateFields]:
        for name, of_span in self._wide.items():
            at = of_span.finish()
            dtype = self._decoders.dtype_of(at.rows)
            if self._is_late and self._decoders.widens_on_device and dtype != at.rows.dtype:
                self._decoders.stored.add(name)
                dtype = at.rows.dtype
            yield WideRows(name, at, dtype)
        for records, room in self._records:
            at = room.finish() if isinstance(room, RowsOfSpan) else RowsAt(room, self._order)
            yield RecordRows(records, at, [self._decoders.dtype_of(np.empty(0, kind)) for kind in records.dtypes])

    @cached_property
    def _order(self) -> IntArray:
        """Compute (n,) int64: the place by arrival of the i-th row."""
        order = np.empty(self._num_rows, np.int64)
        order[np.concatenate(self._targets)] = np.arange(self._num_rows)
        return order


def _planned(ids: IntArray, replaced: Sequence[ChunkRows]) -> IntArray | None:
    if not replaced:
        return None
    planned = ids.copy()
    for group in replaced:
        planned[group.targets] = group.stands_for
    return planned


def _take(name: str, column: BytesColumn | ObjectColumn, group: ChunkRows) -> list[Any]:
    try:
        return column.take(group.rows)
    except UnicodeDecodeError as exc:
        raise DecodeError(
            f"field {name!r} of chunk {group.chunk}: text that is not UTF-8 ({exc}); read it raw with decode=None, or "
            "leave it out with columns="
        ) from exc
    except (ValueError, ArithmeticError, LookupError) as exc:  # of pyarrow, for times inside of lists and structs
        raise DecodeError(
            f"field {name!r} of chunk {group.chunk}: a value that Python has no form for ({exc}); leave it out with "
            "columns=, or write it in another type"
        ) from exc
