"""A chunk that is too large for memory, opened piece by piece onto the disk.

Its columns are joined in files that have no names, and mapped read-only: their pages in use lie in the kernel's
page cache, which shrinks when memory is short. Nothing of the files outlives the chunk, or the process.
"""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from ...storage import ByteRange, Store
from ...storage.files import write_all
from ...storage.memory.mapped import kind_of_disk
from ..arrow_arrays import wrap_numbers
from ..columns import AnyArray, ArrayColumn, Block, BytesColumn, Column, IntArray, ObjectColumn, Ragged, Records
from ..errors import MemoryLimitError
from ..formats.shard import refuse_change, refuse_large

if TYPE_CHECKING:
    from ..formats.shard import ChunkRef

_AT_ONCE = 4  # pieces that are fetched together
_IN_MEMORY = ("tmpfs", "ramfs")
_GROWTH = 2  # how much more than estimated a chunk may take, and a few MiB


class _DiskError(Exception):
    """A temporary file cannot be written."""


class DiskFile(io.RawIOBase):
    """A file without a name, which is written at its end and then mapped.

    Its descriptor is closed when it is mapped, or with the last reference.

    Raises:
        _DiskError: it cannot be made or written.
    """

    def __init__(self) -> None:
        super().__init__()
        try:
            with tempfile.TemporaryFile(buffering=0) as file:
                self._fd = os.dup(file.fileno())
        except OSError as exc:
            raise _DiskError(exc.strerror) from exc
        self._close = weakref.finalize(self, os.close, self._fd)
        self._close.atexit = False
        self.size = 0

    def append(self, data: memoryview) -> int:
        """Write bytes; returns where they begin."""
        start = self.size
        try:
            write_all(self._fd, data)
        except OSError as exc:
            raise _DiskError(exc.strerror) from exc
        self.size += data.nbytes
        return start

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        """As files do, for pyarrow."""
        view = memoryview(data)
        self.append(view)
        return view.nbytes

    def map(self) -> memoryview:
        """All that was written, read-only; nothing is written after that."""
        try:
            return memoryview(mmap.mmap(self._fd, self.size, access=mmap.ACCESS_READ) if self.size else b"")
        finally:
            self._close()

    def array(self, dtype: np.dtype[Any], shape: Sequence[int] = ()) -> AnyArray:
        """All that was written as values of a dtype and shape."""
        return np.frombuffer(self.map(), dtype).reshape(-1, *shape)


@dataclass(frozen=True, slots=True)
class PiecesColumn(ObjectColumn):
    """Several arrays as one column: array i holds the rows from ``firsts[i]`` on, and ``values`` is the first."""

    pieces: tuple[pa.Array, ...]
    firsts: IntArray

    @property
    def nbytes(self) -> int:
        return 0

    @property
    def num_rows(self) -> int:
        return int(self.firsts[-1]) + len(self.pieces[-1])

    def take(self, rows: IntArray) -> list[Any]:
        # pyarrow would join the pieces in memory first.
        found: list[Any] = [None] * len(rows)
        owners = np.searchsorted(self.firsts, rows, side="right") - 1
        for piece in np.unique(owners).tolist():
            places = np.flatnonzero(owners == piece)
            values = self.pieces[piece].take(wrap_numbers(rows[places] - self.firsts[piece])).to_pylist()
            for place, value in zip(places.tolist(), values, strict=True):
                found[place] = value
        return found

    def as_ragged(self) -> Ragged | None:
        return None


class _Values:
    """Joins arrays (n, ...) of one dtype and shape."""

    def __init__(self) -> None:
        self._file = DiskFile()
        self._like = np.empty(0)

    def add(self, values: AnyArray) -> int:
        self._like = values
        self._file.append(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        return int(values.nbytes)

    def finish(self) -> AnyArray:
        return self._file.array(self._like.dtype, self._like.shape[1:])


class _Bytes:
    """Joins columns of bytes or text. Values that pieces share, such as a dictionary's, are written once."""

    def __init__(self) -> None:
        self._data, self._starts, self._stops = DiskFile(), _Values(), _Values()
        self._last, self._base = memoryview(b""), 0
        self._text = False

    def add(self, column: BytesColumn) -> int:
        before = self._data.size
        if column.buffer.nbytes != self._last.nbytes or column.buffer != self._last:
            self._last, self._base = column.buffer, self._data.append(column.buffer)
        taken = self._starts.add(np.where(column.starts >= 0, column.starts + self._base, -1))
        self._text = column.text
        return taken + self._stops.add(column.stops + self._base) + self._data.size - before

    def finish(self) -> BytesColumn:
        return BytesColumn(self._data.map(), self._starts.finish(), self._stops.finish(), self._text)


class _Objects:
    """Joins Arrow arrays, each as a record batch."""

    def __init__(self) -> None:
        self._file = DiskFile()
        self._writer: Any = None
        self._firsts = [0]

    def add(self, values: pa.Array) -> int:
        batch = pa.record_batch({"": values})
        before = self._file.size
        if self._writer is None:
            self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, "w"), batch.schema)
        self._writer.write_batch(batch)
        self._firsts.append(self._firsts[-1] + len(values))
        return self._file.size - before

    def finish(self) -> PiecesColumn:
        self._writer.close()
        with pa.ipc.open_stream(pa.py_buffer(self._file.map())) as stream:
            pieces = tuple(batch.column(0) for batch in stream)
        return PiecesColumn(pieces[0], pieces, np.array(self._firsts[:-1], np.int64))


class _Records:
    """Joins records of the same columns."""

    def __init__(self, like: Records) -> None:
        self._like, self._rows = like, _Values()

    def add(self, records: Records) -> int:
        return self._rows.add(records.rows)

    def finish(self) -> Records:
        return Records(self._like.names, self._like.dtypes, self._rows.finish())


def join_on_disk(pieces: Iterable[Block], chunk: ChunkRef, needed: int) -> Block:
    """Blocks of consecutive rows of a chunk as one, which takes no memory of its own.

    Raises:
        MemoryLimitError: they take far more than the ``needed`` bytes, or the disk is full.
        FormatError: they have not as many rows as the index says.
    """
    columns: dict[str, _Values | _Bytes | _Objects] = {}
    records: list[_Records] = []
    samples = taken = 0
    most = _GROWTH * (needed + chunk.memory_limit)
    try:
        for piece in pieces:
            samples += piece.samples
            for name, column in piece.columns.items():
                taken += _add(columns, name, column)
            for number, packed in enumerate(piece.records):
                if number == len(records):
                    records.append(_Records(packed))
                taken += records[number].add(packed)
            if taken > most:
                refuse_large(chunk, max(taken, chunk.memory_limit + 1), at_least=True)
        refuse_change(chunk, samples)
        found = {name: _finish(column) for name, column in columns.items()}
        return Block(samples, 0, found, tuple(one.finish() for one in records))
    except _DiskError as exc:
        raise _no_room(chunk, needed, str(exc)) from exc


def _add(columns: dict[str, _Values | _Bytes | _Objects], name: str, column: Column) -> int:
    if isinstance(column, ArrayColumn):
        values = columns.setdefault(name, _Values())
        assert isinstance(values, _Values)
        return values.add(column.values)
    if isinstance(column, BytesColumn):
        texts = columns.setdefault(name, _Bytes())
        assert isinstance(texts, _Bytes)
        return texts.add(column)
    objects = columns.setdefault(name, _Objects())
    assert isinstance(objects, _Objects)
    return objects.add(column.values)


def _finish(column: _Values | _Bytes | _Objects) -> Column:
    return ArrayColumn(column.finish()) if isinstance(column, _Values) else column.finish()


def fetch_onto_disk(
    store: Store, chunk: ChunkRef, ranges: Sequence[ByteRange], needed: int, piece_bytes: int
) -> list[memoryview]:
    """Ranges of a chunk, fetched piece by piece.

    Raises:
        MemoryLimitError: they do not fit onto the disk, with what the chunk takes there once opened.
        StorageError.
    """
    refuse_full_disk(chunk, needed)
    pieces = cut_ranges(ranges, piece_bytes)
    try:
        file = DiskFile()
        for first in range(0, len(pieces), _AT_ONCE):
            some = pieces[first : first + _AT_ONCE]
            for data in store.get_ranges(chunk.shard.key, some, etag=chunk.shard.etag):
                file.append(data)
    except _DiskError as exc:
        raise _no_room(chunk, needed, str(exc)) from exc
    whole, parts, start = file.map(), [], 0
    for byte_range in ranges:
        stop = start + byte_range.stop - byte_range.start
        parts.append(whole[start:stop])
        start = stop
    return parts


def cut_ranges(ranges: Sequence[ByteRange], piece_bytes: int) -> list[ByteRange]:
    """Cut ranges into pieces of at most ``piece_bytes``."""
    return [
        ByteRange(start, min(start + piece_bytes, byte_range.stop))
        for byte_range in ranges
        for start in range(byte_range.start, byte_range.stop, piece_bytes)
    ]


def refuse_full_disk(chunk: ChunkRef, needed: int) -> None:
    """Raise MemoryLimitError where temporary files lie in memory, or their disk has less than ``needed`` bytes left."""
    folder = tempfile.gettempdir()
    if _kind_of_disk(folder) in _IN_MEMORY:
        raise _no_room(chunk, needed, "it lies in memory itself")
    space = os.statvfs(folder)
    if space.f_bavail * space.f_frsize < needed:
        raise _no_room(chunk, needed, f"{space.f_bavail * space.f_frsize:,} bytes are free there")


def _no_room(chunk: ChunkRef, needed: int, why: str) -> MemoryLimitError:
    return MemoryLimitError(
        f"{chunk.shard.key} at byte {chunk.offset}: opening this chunk of {chunk.samples:,} samples takes about "
        f"{needed:,} bytes of memory, the limit is {chunk.memory_limit:,}, and it cannot be opened in "
        f"{tempfile.gettempdir()} ({why}); set TMPDIR to a folder on a disk with room, raise memory_limit=, read fewer "
        "columns, or write the data in smaller row groups or record batches"
    )


def _kind_of_disk(folder: str) -> str:
    """The name of a folder's file system; '' where that is not known."""
    try:
        return kind_of_disk(Path(folder).stat().st_dev)
    except OSError:
        return ""
