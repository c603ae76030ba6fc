"""Whole chunks: computing their checksums, and reading a chunk while checking its checksum."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import xxhash

from ...storage import Store, open_store
from ..columns import Block
from ..dataset.manifest import Manifest
from ..errors import ChecksumError
from ..formats.base import refuse_large
from ..formats.shard import ChunkRef, ShardFormat
from ..progress import show_progress

READ_THREADS = 8


def sum_chunks(
    manifest: Manifest,
    *,
    storage_options: Mapping[str, Any] | None = None,
    threads: int = READ_THREADS,
    progress: bool = True,
) -> Manifest:
    """The manifest with a checksum for every chunk; reads all of the data."""
    sums = np.zeros(manifest.num_chunks, np.uint64)

    def sum_one(index: int) -> None:
        chunk = manifest.chunk(index)
        sums[index] = xxhash.xxh3_64_intdigest(store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag))
        advance(chunk.length)

    store = open_store(manifest.url, storage_options=storage_options)
    try:
        with (
            show_progress("reading", manifest.num_bytes, unit="B", enabled=progress) as advance,
            ThreadPoolExecutor(threads, "penstock-sum") as pool,
        ):
            for _ in pool.map(sum_one, range(manifest.num_chunks)):
                pass
    finally:
        store.close()
    return replace(manifest, checksums=sums)


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
    refuse_large(chunk, shard_format.opened_bytes(chunk, header, None, schema))
    whole = store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
    got = None if checksum is None else xxhash.xxh3_64_intdigest(whole)
    if got is not None and got != checksum:
        raise ChecksumError(
            chunk.shard.key,
            f"the {chunk.length} bytes of the chunk have checksum {got:016x}, the manifest says {checksum:016x}",
            offset=chunk.offset,
        )
    ranges = shard_format.chunk_ranges(chunk, header, None)
    parts = []
    for wanted in ranges:
        start, stop = wanted.start - chunk.offset, wanted.stop - chunk.offset
        inside = start >= 0 and stop <= chunk.length
        parts.append(whole[start:stop] if inside else store.get(chunk.shard.key, wanted, etag=chunk.shard.etag))
    return shard_format.open_chunk(chunk, header, parts, None, schema)
