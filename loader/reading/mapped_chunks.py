"""Chunks of files on this machine's disks, mapped into memory instead of read into it.

Memory for a chunk that is new to the process costs more than all that is done with it: it is cleared page by page, then
copied into. The pages of a mapping are those of the kernel's cache. They are checked and opened like any other bytes,
and values are copied out when they are due. Until then the file must stay as it is, which its ETag tells before and
after each look (`penstock.storage.mapped`). So only what is copied by whoever asks for it is mapped: no views, and no
arrays, which are read later and elsewhere.
"""

from __future__ import annotations

import resource
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from ...storage import ByteRange, LocalStore, ObjectInfo, Store
from ..columns import Block, BytesColumn, Column, IntArray
from ..dataset.manifest import Manifest
from ..formats.shard import ChunkRef

# What is smaller than this, malloc has in memory already.
_LEAST_BYTES = 1 << 20
# Of so many values in a row, more than a quarter waited for the disk: what was read is not kept until it is due.
_TRIALS = 256


class MappedChunks:
    """Maps chunks of one store, as long as that pays. Any thread may call.

    Mutable state: how many values were copied of late, how many of them waited, and whether it is given up. An update
    that is lost between two threads matters to nothing.
    """

    def __init__(self, store: LocalStore) -> None:
        self._store = store
        self._looks = self._waits = 0
        self._given_up = False

    @staticmethod
    def of(store: Store) -> MappedChunks | None:
        """None where the store's bytes are not those of files."""
        return MappedChunks(store) if isinstance(store, LocalStore) else None

    def share_in_memory(self, manifest: Manifest) -> float:
        """Which share of a manifest's bytes lies in chunks that are not mapped."""
        if self._given_up or not self._store.can_map():
            return 1.0
        lengths = manifest.lengths
        return float(lengths[lengths < _LEAST_BYTES].sum() / max(1, lengths.sum()))

    def map(self, chunk: ChunkRef, ranges: Sequence[ByteRange]) -> memoryview | None:
        """All of a chunk's bytes, if they are what is asked for and can be mapped; else None.

        Raises:
            StorageError.
        """
        is_large = chunk.length >= _LEAST_BYTES and list(ranges) == [chunk.byte_range]
        if self._given_up or not is_large or chunk.shard.etag is None:
            return None
        return self._store.map(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)

    def guard(self, chunk: ChunkRef, block: Block, data: memoryview) -> Block | None:
        """The block, whose values in ``data`` are taken with care; None where others than slices of bytes are there."""
        columns: dict[str, Column] = {}
        for name, column in block.columns.items():
            if not isinstance(column, BytesColumn) or isinstance(column.buffer.obj, pa.Buffer):
                return None
            columns[name] = column
            if column.buffer.obj is data.obj:
                values = column.buffer, column.starts, column.stops, column.text, column.ascii
                columns[name] = MappedColumn(*values, chunk=chunk, mapped=self)
        return None if block.records else replace(block, columns=columns)

    @contextmanager
    def look(self, files: Iterable[ObjectInfo], values: int) -> Iterator[None]:
        """Copy so many values of files, which must be those that were checked, before and after.

        Raises:
            ObjectChangedError, NotFoundError.
        """
        known = [(file.key, file.etag) for file in files if file.etag is not None]
        for key, etag in known:
            self._store.check_unchanged(key, etag)
        before = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt
        yield
        waits = resource.getrusage(resource.RUSAGE_THREAD).ru_majflt - before
        for key, etag in known:
            self._store.check_unchanged(key, etag)
        self._looks += values
        self._waits += min(waits, values)
        if self._looks >= _TRIALS:
            self._given_up = self._given_up or 4 * self._waits > self._looks
            self._looks = self._waits = 0


@dataclass(frozen=True, slots=True)
class MappedColumn(BytesColumn):
    """Values that lie in a mapped file, to be copied by ``take``, or within ``looking_at``."""

    chunk: ChunkRef = field(kw_only=True)
    mapped: MappedChunks = field(kw_only=True)

    def take(self, rows: IntArray) -> list[Any]:
        with self.mapped.look([self.chunk.shard], len(rows)):
            return BytesColumn.take(self, rows)


@contextmanager
def looking_at(columns: Iterable[MappedColumn], values: int) -> Iterator[None]:
    """Copy so many values of columns.

    Raises:
        ObjectChangedError, NotFoundError: a file is not as it was when it was checked.
    """
    of_source: dict[MappedChunks, dict[str, ObjectInfo]] = {}
    for column in columns:
        shard = column.chunk.shard
        of_source.setdefault(column.mapped, {})[shard.key] = shard
    with ExitStack() as looks:
        for mapped, files in of_source.items():
            looks.enter_context(mapped.look(files.values(), values))
        yield
