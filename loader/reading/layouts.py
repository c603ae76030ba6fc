"""Places of values in chunks, kept from one opening to the next: the headers of an archive are walked once.

A layout depends on the chunk's bytes alone. So it is used again for bytes of the same length and checksum, whatever
else is known of the object; for any others the chunk is opened anew. If the bytes of values do not affect the layout,
as in an archive whose headers state sizes, the checksum covers only the bytes between them.
"""

from __future__ import annotations

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import xxhash

from ...storage import ByteRange, DiscardingStore, ObjectInfo, Store
from ...storage.errors import StorageError
from ...storage.hashing import xxh3_64
from ..arrow_arrays import view_numbers, wrap_lists, wrap_numbers, wrap_texts
from ..columns import AnyArray, Block, BytesColumn, Column
from ..dataset.cache import SealedFolder
from ..dataset.manifest import UNTHREADED
from ..errors import FormatError

if TYPE_CHECKING:
    from ..counters import Counters
    from ..dataset.manifest import Manifest
    from ..formats.shard import ShardFormat


# What the formats make of the same bytes: to be raised when that changes.
_VERSION = 1
_KEPT = 32
_MOST_BYTES = 64 << 20  # of a file: some two million samples
_LARGEST = np.iinfo(np.int32).max  # of the chunks
# Of fewer samples in fewer chunks, headers are walked in the time that a file takes.
_FEWEST_SAMPLES, _FEWEST_CHUNKS = 1000, 8
_LOCK_PATIENCE_S = 1.0  # without the lock, what others found meanwhile may be lost

IN_CHUNK = memoryview(b"")  # stands for the chunk's own bytes, which are not kept


@dataclass(frozen=True, slots=True)
class Layout:
    """A chunk as it is opened from bytes of this ``checksum`` and ``length``, which ``IN_CHUNK`` stands for."""

    checksum: int
    length: int
    block: Block


class KeptLayouts:
    """The layouts that processes of this node found, of one manifest. Any thread may call.

    Mutable state: the file's content, once it is read, under a lock. Every failure means that nothing is kept.
    """

    def __init__(
        self, manifest: Manifest, columns: Sequence[str] | None, cache_dir: str | os.PathLike[str] | None
    ) -> None:
        self._folder = SealedFolder("layouts", cache_dir, kept=_KEPT)
        # Data sets of equal shapes, as parts of a larger one may be, have one fingerprint, and need not share a file.
        sums = None if manifest.checksums is None else xxhash.xxh3_128_hexdigest(manifest.checksums.tobytes())
        of_manifest = [manifest.fingerprint, sums or manifest.url, sums is not None, manifest.format, manifest.config]
        identity = [_VERSION, *of_manifest, manifest.schema, columns]
        self._key = xxhash.xxh3_128_hexdigest(json.dumps(identity, sort_keys=True, default=str).encode())
        self._table: _Table | None = None
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of memory that the layouts take."""
        return 0 if self._table is None else self._table.nbytes

    def find(self, chunk: int, most_bytes: int) -> Layout | None:
        """The layout of a chunk, for bytes that are yet to be compared with it; of a table no larger than this."""
        if self._table is None:
            with self._lock:
                if self._table is None:
                    table = self._read()
                    self._table = table if table.nbytes <= most_bytes else _Table(pa.Table.from_batches([], _SCHEMA))
        return self._table.find(chunk)

    def save(self, found: Mapping[int, Layout]) -> None:
        """Add these if there is room; those of other processes stay."""
        found = {chunk: layout for chunk, layout in found.items() if layout.length <= _LARGEST}
        samples = sum(layout.block.samples for layout in found.values())
        if samples < _FEWEST_SAMPLES and len(found) < _FEWEST_CHUNKS:
            return
        with suppress(OSError, StorageError, pa.ArrowException), self._folder.lock(self._key, wait_s=_LOCK_PATIENCE_S):
            known = self._read()
            data = _write(pa.concat_tables([known.without(set(found)), _tabulate(found)]))
            if len(data) <= _MOST_BYTES:
                self._folder.save(self._key, data)

    def _read(self) -> _Table:
        with suppress(StorageError, pa.ArrowException):  # a folder that is not this user's alone
            data = self._folder.load(self._key)
            if data is not None:
                return _Table(pa.ipc.open_file(pa.BufferReader(data), options=UNTHREADED).read_all())
        return _Table(pa.Table.from_batches([], _SCHEMA))


_SCHEMA = pa.schema(
    {
        "chunk": pa.int64(),
        "checksum": pa.uint64(),
        "length": pa.int64(),
        "samples": pa.int64(),
        "nbytes": pa.int64(),
        "field": pa.string(),
        "in_chunk": pa.bool_(),  # that is where the values are
        "text": pa.bool_(),
        "ascii": pa.bool_(),
        "places": pa.list_(pa.int32()),  # the starts, then the stops
        "data": pa.list_(pa.uint8()),  # the values, where they are not in the chunk
    }
)
_ONE_A_FIELD = _SCHEMA.names[:-2]


class _Table:
    """Layouts in a table of ``_SCHEMA``, one row a field; a chunk's fields stand together."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table
        self.nbytes = int(table.nbytes)
        self._columns = {name: table.column(name).to_pylist() for name in _ONE_A_FIELD}
        places, self._places_at = _ends(table.column("places"))
        self._places = places.astype(np.int64)
        self._data, self._data_at = _ends(table.column("data"))
        self._rows: dict[int, range] = {}
        for row, chunk in enumerate(self._columns["chunk"]):
            self._rows[chunk] = range(self._rows.get(chunk, range(row, row)).start, row + 1)

    def without(self, chunks: set[int]) -> pa.Table:
        """The table without these chunks."""
        kept = [chunk not in chunks for chunk in self._columns["chunk"]]
        return self._table.filter(wrap_numbers(np.array(kept, np.bool_)))

    def find(self, chunk: int) -> Layout | None:
        rows = self._rows.get(chunk)
        if rows is None:
            return None
        first = {name: values[rows.start] for name, values in self._columns.items()}
        columns = {self._columns["field"][row]: self._column(row) for row in rows}
        return Layout(first["checksum"], first["length"], Block(first["samples"], first["nbytes"], columns))

    def _column(self, row: int) -> BytesColumn:
        start, stop = self._places_at[row : row + 2]
        middle = (start + stop) // 2
        starts, stops = self._places[start:middle], self._places[middle:stop]
        if self._columns["in_chunk"][row]:
            return BytesColumn(IN_CHUNK, starts, stops, text=self._columns["text"][row])
        data = self._data[self._data_at[row] : self._data_at[row + 1]].tobytes()
        text = data.decode("ascii") if self._columns["ascii"][row] else None
        return BytesColumn(memoryview(data), starts, stops, text=self._columns["text"][row], ascii=text)


def _ends(lists: pa.ChunkedArray) -> tuple[AnyArray, list[int]]:
    """The values of all rows, end to end, and where each row's begin in them, and the last one's end."""
    one: Any = pa.concat_arrays(lists.chunks) if lists.num_chunks else pa.nulls(0, lists.type)
    return view_numbers(one.values), view_numbers(one.offsets).tolist()


def _tabulate(found: Mapping[int, Layout]) -> pa.Table:
    rows: dict[str, list[Any]] = {name: [] for name in _SCHEMA.names}
    for chunk, layout in sorted(found.items()):
        block = layout.block
        for name, column in block.columns.items():
            assert isinstance(column, BytesColumn)
            row = {
                "chunk": chunk,
                "checksum": layout.checksum,
                "length": layout.length,
                "samples": block.samples,
                "nbytes": block.nbytes,
                "field": name,
                "in_chunk": column.buffer is IN_CHUNK,
                "text": column.text,
                "ascii": column.ascii is not None,
                "places": np.concatenate([column.starts, column.stops]),
                "data": np.frombuffer(column.buffer, np.uint8),
            }
            for key, value in row.items():
                rows[key].append(value)
    return pa.Table.from_arrays([_wrap(rows[field.name], field.type) for field in _SCHEMA], schema=_SCHEMA)


def _wrap(values: list[Any], kind: pa.DataType) -> pa.Array:
    if pa.types.is_string(kind):
        return wrap_texts(values)
    if pa.types.is_list(kind):
        return wrap_lists(values, np.dtype(kind.value_type.to_pandas_dtype()))
    return wrap_numbers(np.array(values, kind.to_pandas_dtype()))


def _write(table: pa.Table) -> memoryview:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, _SCHEMA) as writer:
        writer.write_table(table.combine_chunks())
    return memoryview(sink.getvalue())


_ENTRY_BYTES = 1000  # what a layout takes beside its arrays, about


class Layouts:
    """Keeps layouts of ``budget_bytes`` at most, those that came first. Called by any thread.

    ``kept`` has those that other processes found, and ``close`` adds those that were found here.

    Mutable state: the layouts and the sum of their bytes, under a lock.
    """

    def __init__(self, budget_bytes: int, *, is_framed: bool, kept: KeptLayouts | None = None) -> None:
        self._budget = budget_bytes
        self._kept = kept
        self._sum = _sum_between if is_framed else _sum_all
        self._layouts: dict[int, Layout] = {}
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of what is kept, about; resident chunks share them."""
        return self._nbytes + (0 if self._kept is None else self._kept.nbytes)

    def limit(self, budget_bytes: int) -> None:
        """Change the budget; where more is kept, it is dropped."""
        with self._lock:
            self._budget = budget_bytes
            if self._nbytes > budget_bytes:
                self._layouts.clear()
                self._nbytes = 0

    def find(self, chunk: int, data: memoryview, checksum: int | None) -> Block | None:
        """The chunk as it is opened from ``data``; None if its layout is unknown.

        ``checksum`` is the XXH3-64 of ``data`` where that is known, as it was when the layout was kept.
        """
        layout = self._layouts.get(chunk)
        if layout is None and self._kept is not None:
            layout = self._kept.find(chunk, self._budget)
        if layout is None or layout.length != len(data):
            return None
        if layout.checksum != (self._sum(layout.block, IN_CHUNK, data) if checksum is None else checksum):
            return None
        return replace(layout.block, columns=_exchange(layout.block.columns, IN_CHUNK, data))

    def close(self) -> None:
        """Save the layouts that were found for other processes."""
        with self._lock:
            found = dict(self._layouts)
        if self._kept is not None and found:
            self._kept.save(found)

    def keep(
        self,
        chunk: int,
        block: Block,
        data: memoryview,
        checksum: int | None,
        *,
        check: Callable[[], None] | None = None,
    ) -> None:
        """Remember where the values are that ``block`` has in ``data``, if there is room, and nothing of ``data``.

        Blocks with other values than bytes are skipped: what is made of a chunk's bytes may refer to all of them.
        ``check`` raises an error where ``data`` may be other bytes by now: such a layout is not kept.
        """
        columns = [column for column in block.columns.values() if isinstance(column, BytesColumn)]
        if block.records or len(columns) < len(block.columns) or all(c.buffer is not data for c in columns):
            return
        kept = replace(block, columns=_exchange(block.columns, data, IN_CHUNK))
        nbytes = _ENTRY_BYTES + sum(_count_bytes(c) for c in kept.columns.values() if isinstance(c, BytesColumn))
        if self._nbytes + nbytes > self._budget:
            return
        found = self._sum(kept, IN_CHUNK, data) if checksum is None else checksum
        if check is not None:
            check()
        with self._lock:
            if chunk not in self._layouts and self._nbytes + nbytes <= self._budget:
                self._layouts[chunk] = Layout(found, len(data), kept)
                self._nbytes += nbytes


def _sum_all(block: Block, buffer: memoryview, data: memoryview) -> int:
    return xxh3_64(data)


def _sum_between(block: Block, buffer: memoryview, data: memoryview) -> int:
    """The XXH3-64 of what lies between the values that are in ``buffer``, which stands for ``data``."""
    columns = [c for c in block.columns.values() if isinstance(c, BytesColumn) and c.buffer is buffer]
    starts = np.concatenate([column.starts for column in columns])
    stops = np.concatenate([column.stops for column in columns])
    order = np.flatnonzero(starts >= 0)
    order = order[np.argsort(starts[order], kind="stable")]
    # Values may share bytes: what comes after one begins after all that began before.
    begins = [0, *np.maximum.accumulate(stops[order]).tolist()]
    total = xxhash.xxh3_64()
    for begin, end in zip(begins, [*starts[order].tolist(), len(data)], strict=True):
        if begin < end:
            total.update(data[begin:end])
    return total.intdigest()


def _exchange(columns: Mapping[str, Column], old: memoryview, new: memoryview) -> dict[str, Column]:
    return {
        name: replace(column, buffer=new) if isinstance(column, BytesColumn) and column.buffer is old else column
        for name, column in columns.items()
    }


def _count_bytes(column: BytesColumn) -> int:
    return column.starts.nbytes + column.stops.nbytes + len(column.buffer) + len(column.ascii or "")


ENTRY_BYTES = 300  # what a shard takes beside its header: a lock, and its place in the table; measured


_Range = tuple[str, ByteRange | None, str]  # an object's key, a part of it, its ETag


class _NotingStore:
    """Reads from a store, which may cache, and notes the ranges that it reads."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner
        self.ranges: list[_Range] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def get(self, key: str, byte_range: ByteRange | None = None, *, etag: str | None = None) -> memoryview:
        if etag is not None:
            self.ranges.append((key, byte_range, etag))
        return self._inner.get(key, byte_range, etag=etag)

    def get_ranges(self, key: str, ranges: Sequence[ByteRange], *, etag: str | None = None) -> list[memoryview]:
        if etag is not None:
            self.ranges += [(key, byte_range, etag) for byte_range in ranges]
        return self._inner.get_ranges(key, ranges, etag=etag)


class _Entry:
    """One shard's header, opened under ``lock``. None is a header too, hence ``is_open``."""

    __slots__ = ("header", "is_open", "lock", "nbytes", "ranges")

    def __init__(self) -> None:
        self.ranges: list[_Range] = []  # what was read for it of a store that keeps it
        self.lock = threading.Lock()
        self.is_open = False
        self.header: Any = None
        self.nbytes = ENTRY_BYTES


class HeaderCache:
    """Opens each shard when it is first asked for, and keeps its header. Called by any thread.

    Headers take ``budget_bytes`` at most, by their own ``nbytes``: those that were not asked for longest are dropped,
    and read again when they are needed. One header is kept whatever its size.

    Threads that ask for a shard while another one opens it wait for that one. Mutable state: the entries and their
    sum of bytes, under a lock, and each entry under its own.
    """

    def __init__(self, shard_format: ShardFormat, store: Store, counters: Counters, *, budget_bytes: int) -> None:
        self._format = shard_format
        self._store = store
        self._counters = counters
        self._budget = budget_bytes
        self._entries: OrderedDict[str, _Entry] = OrderedDict()  # the one unused for longest first
        self._nbytes = 0
        self._lock = threading.Lock()

    @property
    def nbytes(self) -> int:
        """Bytes of all headers, as their formats estimate them."""
        return self._nbytes

    def limit(self, budget_bytes: int) -> None:
        """Change the budget; headers beyond a smaller one are dropped at once."""
        with self._lock:
            self._budget = budget_bytes
            self._evict()

    def get(self, shard: ObjectInfo) -> Any:
        """The shard's header, as the format's ``open_shard`` returned it.

        Raises what ``open_shard`` raises. A failure is not kept, nor are damaged bytes by the store: each thread that
        waited, and each later call, opens the shard again.
        """
        with self._lock:
            entry = self._entries.get(shard.key)
            if entry is None:
                entry = self._entries[shard.key] = _Entry()
                self._nbytes += entry.nbytes
                self._evict()
            self._entries.move_to_end(shard.key)
        with entry.lock:
            if not entry.is_open:
                entry.header = self._open(entry, shard)
                entry.is_open = True
                self._count(shard.key, entry)
            return entry.header

    def _open(self, entry: _Entry, shard: ObjectInfo) -> Any:
        if not isinstance(self._store, DiscardingStore):
            return self._format.open_shard(self._store, shard)
        store: Any = _NotingStore(self._store)
        entry.ranges = store.ranges
        try:
            return self._format.open_shard(store, shard)
        except FormatError:
            self._discard(entry)
            raise

    def _discard(self, entry: _Entry) -> None:
        """Make the store fetch the bytes of an entry again."""
        if isinstance(self._store, DiscardingStore):
            for key, byte_range, etag in entry.ranges:
                self._store.discard(key, byte_range, etag=etag)

    def has(self, shard: ObjectInfo) -> bool:
        """Return whether the shard's header is in the cache."""
        with self._lock:
            entry = self._entries.get(shard.key)
            return entry is not None and entry.is_open

    def forget(self, shard: ObjectInfo) -> None:
        """Have the shard fetched and opened again when it is next asked for, past what the store keeps.

        A thread that is opening it keeps that for itself.
        """
        with self._lock:
            entry = self._entries.pop(shard.key, None)
            if entry is None:
                return
            self._nbytes -= entry.nbytes
        self._discard(entry)

    def _count(self, key: str, entry: _Entry) -> None:
        """Add an opened header's bytes, unless it was forgotten or dropped meanwhile."""
        with self._lock:
            if entry.header is not None and self._entries.get(key) is entry:
                entry.nbytes += entry.header.nbytes
                self._nbytes += entry.header.nbytes
                self._evict()

    def _evict(self) -> None:
        """Drop what was unused for longest until the rest fits. Holds the lock."""
        dropped = 0
        while self._nbytes > self._budget and len(self._entries) > 1:
            _, entry = self._entries.popitem(last=False)
            self._nbytes -= entry.nbytes
            dropped += entry.nbytes > ENTRY_BYTES
        if dropped:
            self._counters.add(evicted_headers=dropped)
