"""Checksums of chunks and of their parts: computed for a manifest, and compared with what is read."""

from __future__ import annotations

import bisect
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage import ByteRange, Store, open_store
from ...storage.hashing import xxh3_64
from ...storage.threads.daemon_pool import DaemonPool
from ..counters import Counters
from ..dataset.manifest import FORMATS_IN_PARTS, PartSums, SumArray
from ..errors import ChecksumError, FormatError
from ..formats.detect import make_format
from ..formats.hive import Partitions
from ..formats.shard import refuse_large
from .layouts import HeaderCache

if TYPE_CHECKING:
    from ..columns import Block
    from ..dataset.manifest import Manifest
    from ..formats.shard import ChunkRef, ShardFormat

READ_THREADS = 8
_HEADER_BYTES = 128 << 20
_NO_SUMS: SumArray = np.zeros(0, np.uint64)


def sum_chunks(
    manifest: Manifest,
    *,
    storage_options: Mapping[str, Any] | None = None,
    threads: int = READ_THREADS,
    progress: bool = True,
    saved: Manifest | None = None,
) -> Manifest:
    """The manifest with checksums for every chunk and what may be read of it by itself.

    Reads all of the data, but for chunks of objects that did not change since ``saved``, which has their checksums.
    """
    known = {} if saved is None else known_sums(saved)
    shard_format = make_format(manifest.format, manifest.config)
    from ..progress import show_progress

    found: list[tuple[int, SumArray]] = [(0, _NO_SUMS)] * manifest.num_chunks

    def sum_one(index: int) -> None:
        chunk = manifest.chunk(index)
        before = known.get(chunk)
        found[index] = before or sum_chunk(store, shard_format, headers.get(chunk.shard), chunk)
        advance(chunk.length)

    store = open_store(manifest.url, storage_options=storage_options)
    headers = HeaderCache(shard_format, store, Counters(), budget_bytes=_HEADER_BYTES)
    try:
        with (
            show_progress("reading", manifest.num_bytes, unit="B", enabled=progress) as advance,
            DaemonPool("penstock-sum", threads) as pool,
        ):
            for _ in pool.map(sum_one, range(manifest.num_chunks)):
                pass
    finally:
        store.close()
    return with_sums(manifest, found)


def manifest_sums(manifest: Manifest) -> list[tuple[int, SumArray]] | None:
    """Return the results of ``sum_chunk`` for each chunk of a manifest; None if it lacks some of them."""
    if manifest.checksums is None or manifest.lacks_parts:
        return None
    parts = manifest.parts
    return [
        (whole, _NO_SUMS if parts is None else parts.of(index))
        for index, whole in enumerate(manifest.checksums.tolist())
    ]


def known_sums(saved: Manifest) -> dict[ChunkRef, tuple[int, SumArray]]:
    """The results of ``sum_chunk`` that a manifest has, by chunks, where ETags tell whether these have changed."""
    sums = manifest_sums(saved)
    chunks = (saved.chunk(index) for index in range(saved.num_chunks))
    return {} if sums is None else {c: s for c, s in zip(chunks, sums, strict=True) if c.shard.etag is not None}


def with_sums(manifest: Manifest, found: Sequence[tuple[int, SumArray]]) -> Manifest:
    """The manifest with what ``sum_chunk`` returned for each of its chunks."""
    parts = PartSums.join([parts for _, parts in found]) if manifest.format in FORMATS_IN_PARTS else None
    return replace(manifest, checksums=np.array([whole for whole, _ in found], np.uint64), parts=parts)


def sum_chunk(store: Store, shard_format: ShardFormat, header: Any, chunk: ChunkRef) -> tuple[int, SumArray]:
    """The checksum of a chunk, and those of its parts."""
    whole = store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
    ranges = shard_format.chunk_parts(chunk, header)
    parts = np.zeros(len(ranges), np.uint64)
    for number, part in enumerate(ranges):
        cut = _cut(chunk, whole, part)
        data = store.get(chunk.shard.key, part, etag=chunk.shard.etag) if cut is None else cut
        parts[number] = xxh3_64(data)
    return xxh3_64(whole), parts


def _cut(chunk: ChunkRef, whole: memoryview, wanted: ByteRange) -> memoryview | None:
    """A range of a chunk that was read; None where it lies outside."""
    start, stop = wanted.start - chunk.offset, wanted.stop - chunk.offset
    return whole[start:stop] if start >= 0 and stop <= chunk.length else None


def has_whole_sums_alone(manifest: Manifest) -> bool:
    """Return whether chunks are compared only if they are read whole."""
    return manifest.checksums is not None and manifest.lacks_parts


class UncheckedColumnsWarning(UserWarning):
    """Columns are read that the manifest has no checksums for, though it has those of whole chunks."""


class ChunkChecks:
    """Compares what is read of chunks with the manifest's checksums. Called by any thread.

    The only state is whether it was said that some cannot be compared, under a lock.
    """

    def __init__(self, manifest: Manifest, shard_format: ShardFormat) -> None:
        self._manifest = manifest
        self._format = shard_format
        self._has_warned = False
        self._warning = threading.Lock()

    def check(
        self, index: int, chunk: ChunkRef, header: Any, ranges: Sequence[ByteRange], parts: Sequence[memoryview]
    ) -> None:
        """Compare ranges of a chunk, where the manifest has checksums.

        Raises:
            ChecksumError: they differ.
            FormatError: the chunk has other parts than when it was indexed.
        """
        if self._manifest.checksums is None:
            return
        rest: list[tuple[ByteRange, memoryview]] = []
        for wanted, data in zip(ranges, parts, strict=True):
            if wanted == chunk.byte_range:
                _compare(chunk, wanted, data, int(self._manifest.checksums[index]))
            else:
                rest.append((wanted, data))
        if rest and self._manifest.parts is None:
            self._warn()
        elif rest and self._manifest.parts is not None:
            self._check_parts(chunk, header, rest, self._manifest.parts.of(index))

    def _check_parts(
        self, chunk: ChunkRef, header: Any, read: Sequence[tuple[ByteRange, memoryview]], sums: SumArray
    ) -> None:
        parts = self._format.chunk_parts(chunk, header)
        if len(parts) != len(sums):
            problem = f"has {len(parts)} parts where the manifest says {len(sums)}; index the data set again"
            raise FormatError(chunk.shard.key, problem, offset=chunk.offset)
        starts = [wanted.start for wanted, _ in read]
        for part, expected in zip(parts, sums.tolist(), strict=True):
            at = bisect.bisect_right(starts, part.start) - 1
            if at >= 0 and part.stop <= read[at][0].stop:
                offset = part.start - starts[at]
                _compare(chunk, part, read[at][1][offset : offset + len(part)], expected)

    def _warn(self) -> None:
        with self._warning:
            is_first, self._has_warned = not self._has_warned, True
        if is_first:
            warnings.warn(
                f"{self._manifest.url}: the manifest has checksums of whole chunks only, so parts of chunks are read "
                "unchecked; run `penstock index` to add checksums of the parts",
                UncheckedColumnsWarning,
                stacklevel=2,
            )


def _compare(chunk: ChunkRef, part: ByteRange, data: memoryview, expected: int) -> None:
    found = xxh3_64(data)
    if found != expected:
        raise ChecksumError(
            chunk.shard.key,
            f"{len(part)} bytes with checksum {found:016x} where the manifest holds {expected:016x}; "
            "the object is damaged or was rewritten: restore it, or rebuild the manifest with `penstock index`",
            offset=part.start,
        )


def read_chunk(
    store: Store,
    shard_format: ShardFormat,
    header: Any,
    chunk: ChunkRef,
    schema: Mapping[str, Any],
    *,
    checksum: int | None = None,
) -> Block:
    """Fetch a whole chunk, compare its checksum if one is given, and open it.

    Raises:
        ChecksumError, FormatError: the bytes are not those of the manifest, or are no such chunk.
        MemoryLimitError: the chunk takes more memory than it may.
        StorageError: they cannot be read, or the object has changed.
    """
    partitions = Partitions.of(schema, None)
    refuse_large(chunk, shard_format.opened_bytes(chunk, header, None, partitions.schema))
    whole = store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
    got = None if checksum is None else xxh3_64(whole)
    if got is not None and got != checksum:
        raise ChecksumError(
            chunk.shard.key,
            f"the {chunk.length} bytes of the chunk have checksum {got:016x}, the manifest says {checksum:016x}",
            offset=chunk.offset,
        )
    ranges = shard_format.chunk_ranges(chunk, header, None)
    parts = []
    for wanted in ranges:
        cut = _cut(chunk, whole, wanted)
        parts.append(store.get(chunk.shard.key, wanted, etag=chunk.shard.etag) if cut is None else cut)
    return partitions.add_to(shard_format.open_chunk(chunk, header, parts, None, partitions.schema), chunk)
