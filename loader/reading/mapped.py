"""Chunks of files on this machine's disks, mapped into memory instead of read into it.

Memory for a chunk that is new to the process costs more than all that is done with it: it is cleared page by page, then
copied into. The pages of a mapping are those of the kernel's cache. They are checked and opened like any other bytes,
and values are copied out when they are due. Until then the file must not change, which its ETag shows before and after
each copy (`penstock.storage.memory.mapped`). So only values that are copied when they are used are mapped: nothing that
a format makes while it opens a chunk, and views only if users say that their files never change."""

from __future__ import annotations

import math
import resource
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import numpy as np
import pyarrow as pa

from ...storage import ByteRange, LocalStore, Store
from ..columns import ArrayColumn, Block, BytesColumn, Column, IntArray

if TYPE_CHECKING:
    from ..formats.shard import ChunkRef


# Values a decision: it does not pay if more than a quarter of them were copied in vain.
_TRIALS = 256


class Looks:
    """Decision whether copying from mapped files pays, beside reading them. Any thread may call.

    Mutable state: how many values were copied of late, how many of them in vain, and whether it still pays. An update
    that is lost between two threads does no harm.
    """

    def __init__(self) -> None:
        self.pay = True
        self._count = self._in_vain = 0

    def note(self, values: int, in_vain: int) -> None:
        """Count a copy of ``values``; those ``in_vain`` waited for the disk: pages are not kept until they are due."""
        self._count += values
        self._in_vain += in_vain
        if self._count >= _TRIALS:
            self.pay = self.pay and 4 * self._in_vain <= self._count
            self._count = self._in_vain = 0


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class MappedFile:
    """A file, as it was when it was indexed. There is one of these for each file, as long as it is needed."""

    store: LocalStore
    key: str
    etag: str
    looks: Looks

    def check(self) -> None:
        """Raise ObjectChangedError where the file is another one now, NotFoundError where there is none."""
        self.store.check_unchanged(self.key, self.etag)


@contextmanager
def looking_at(files: Collection[MappedFile], values: int, *, in_vain: int = 0) -> Iterator[None]:
    """Guard a copy of values from the pages of files: before and after it, the files are as they were indexed.

    ``in_vain`` of the ``values`` would take less time if they were read, as do those that wait for the disk.

    Raises:
        ObjectChangedError, NotFoundError: one of the files is not.
    """
    for file in files:
        file.check()
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
    yield
    waits = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before
    for file in files:
        file.check()
    for looks in {file.looks for file in files}:
        looks.note(values, max(in_vain, min(waits, values)))


# What is smaller than this, malloc has in memory already.
_LEAST_BYTES = 1 << 20
# Narrower rows of arrays are copied by many calls, each of which would have to ask.
LEAST_ROW_BYTES = 1024


class MappedChunks:
    """Maps chunks of one store, as long as that pays. Any thread may call."""

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._looks = Looks()
        self._files: WeakValueDictionary[tuple[str, str], MappedFile] = WeakValueDictionary()  # by key and ETag

    @staticmethod
    def of(store: Store, *, views: bool) -> MappedChunks | None:
        """None where the store's bytes are not those of files, or where it does not let ``views`` of them be kept."""
        return MappedChunks(store) if isinstance(store, LocalStore) and (store.maps_views or not views) else None

    def limit(self, nbytes: int) -> None:
        """Keep no more than this mapped, but for what is in use."""
        self._store.limit_pages(nbytes)

    def map(self, chunk: ChunkRef, ranges: Sequence[ByteRange]) -> memoryview | None:
        """All of a chunk's bytes, if they are what is asked for and can be mapped; else None.

        Raises:
            StorageError.
        """
        is_large = chunk.length >= _LEAST_BYTES and list(ranges) == [chunk.byte_range]
        if not self._looks.pay or not is_large or chunk.shard.etag is None:
            return None
        return self._store.map(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)

    def guard(self, chunk: ChunkRef, block: Block, data: memoryview) -> Block | None:
        """Guard the copies of a block's values in ``data``; None if that is impossible, or does not pay.

        Values that the format has copied already, such as small ones, are those of the indexed file.

        Raises:
            ObjectChangedError, NotFoundError: the file is not as it was when it was indexed.
        """
        file = self._file(chunk)
        columns: dict[str, Column] = {}
        for name, column in block.columns.items():
            guarded = _guard(column, data, file)
            if guarded is None:
                return None
            columns[name] = guarded
        file.check()
        return None if block.records else replace(block, columns=columns)

    def check(self, chunk: ChunkRef) -> None:
        """Raise ObjectChangedError where a chunk's file is another one now, NotFoundError where there is none."""
        self._file(chunk).check()

    def _file(self, chunk: ChunkRef) -> MappedFile:
        key, etag = chunk.shard.key, chunk.shard.etag
        assert etag is not None
        return self._files.setdefault((key, etag), MappedFile(self._store, key, etag, self._looks))


@dataclass(frozen=True, slots=True)
class MappedArray(ArrayColumn):
    """Rows in the pages of a file; copied within ``looking_at``."""

    file: MappedFile = field(kw_only=True)


@dataclass(frozen=True)
class MappedColumn(BytesColumn):
    """Values that lie in a mapped file; copied by ``take``, or within ``looking_at``."""

    file: MappedFile = field(kw_only=True)

    def take(self, rows: IntArray) -> list[Any]:
        with looking_at([self.file], len(rows)):
            return BytesColumn.take(self, rows)


def _guard(column: Column, data: memoryview, file: MappedFile) -> Column | None:
    if isinstance(column, ArrayColumn):
        values = column.values
        if not np.may_share_memory(values, np.frombuffer(data, np.uint8)):
            return column
        is_wide = values.itemsize * math.prod(values.shape[1:]) >= LEAST_ROW_BYTES
        return MappedArray(values, file=file) if is_wide else None
    if not isinstance(column, BytesColumn) or isinstance(column.buffer.obj, pa.Buffer):
        return None
    if column.buffer.obj is not data.obj:
        return column
    return MappedColumn(column.buffer, column.starts, column.stops, column.text, column.ascii, file=file)
