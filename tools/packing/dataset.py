"""A data set that the loader reads as samples: tables as record batches, JSON as it is, all else column by column."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import closing
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa

from ...loader.columns import ArrayColumn, Block, BytesColumn
from ...loader.counters import Counters
from ...loader.dataset.class_names import LABEL_FIELD, find_difference
from ...loader.dataset.manifest import Manifest
from ...loader.errors import ChecksumError, ConfigError
from ...loader.formats.arrow.ipc import ArrowFormat
from ...loader.formats.arrow.parquet import ParquetFormat
from ...loader.formats.compressed import codec_of, decompressed_pieces
from ...loader.formats.detect import make_format
from ...loader.formats.hive import Partitions
from ...loader.formats.json.jsonl import JsonlFormat
from ...loader.formats.json.lines import find_lines, parsed_rows
from ...loader.formats.json.types import to_arrow
from ...loader.formats.schema import refuse_missing
from ...loader.formats.shard import ChunkRef
from ...loader.reading.checksum import read_chunk
from ...loader.reading.layouts import HeaderCache
from ...storage import open_store
from ...storage.hashing import xxh3_64
from ...storage.threads.daemon_pool import DaemonPool
from .samples import Batch, SourceOptions

_THREADS = 4
_HEADER_BYTES = 64 << 20
_ROWS = 256

_Items: TypeAlias = "Sequence[Any] | pa.RecordBatch"


class DatasetSource:
    """The samples of a data set in its order; a piece is a chunk."""

    def __init__(self, manifest: Manifest, storage_options: Mapping[str, Any] | None, options: SourceOptions) -> None:
        """Raises ConfigError if other classes are given than the data set has, and nothing changes its numbers."""
        self.classes = _choose_classes(manifest, options)
        self._manifest = manifest
        self._format = make_format(manifest.format, manifest.config)
        refuse_missing(manifest.schema)
        self._partitions = Partitions.of(manifest.schema, None)
        self._store = open_store(manifest.url, storage_options=storage_options)
        self._headers = HeaderCache(self._format, self._store, Counters(), budget_bytes=_HEADER_BYTES)
        self.total: int | None = manifest.num_samples
        etags = [shard.etag for shard in manifest.shards]
        self.identity: Any = ["dataset", manifest.fingerprint, etags]
        self.notes: Sequence[str] = ()
        self.has_members = manifest.format == "tar"
        self.hints = self._find_hints()

    def _find_hints(self) -> dict[str, pa.DataType]:
        if isinstance(self._format, JsonlFormat):
            types = {name: column["type"] for name, column in self._partitions.schema["columns"].items()}
            # What was never there is written as text that is never there.
            return {name: to_arrow(kind) for name, kind in types.items() if kind != "any"}
        return {}

    def before(self, piece: int) -> int:
        return int(self._manifest.first_ids[piece])

    def close(self) -> None:
        self._store.close()

    def batches(self, first_piece: int = 0) -> Iterator[Batch]:
        running: deque[tuple[int, Future[list[_Items]]]] = deque()
        with DaemonPool("penstock-pack-read", _THREADS) as pool:
            for piece in range(first_piece, self._manifest.num_chunks):
                chunk = self._manifest.chunk(piece)
                if isinstance(self._format, JsonlFormat) and (codec := codec_of(chunk.shard.key)):
                    # One chunk, perhaps larger than memory: read as a stream.
                    while running:
                        yield from _batches(*running.popleft())
                    yield from (Batch(piece, rows) for rows in self._stream_lines(chunk, codec))
                    continue
                if len(running) >= _THREADS:
                    yield from _batches(*running.popleft())
                running.append((piece, pool.submit(self._read, piece, chunk)))
            while running:
                yield from _batches(*running.popleft())

    def _read(self, piece: int, chunk: ChunkRef) -> list[_Items]:
        shard_format, shard = self._format, chunk.shard.key
        if isinstance(shard_format, JsonlFormat):
            run = self._checked(piece, chunk)
            base = 3 if chunk.offset == 0 and bytes(run[:3]) == b"\xef\xbb\xbf" else 0
            return [self._complete(parsed_rows(find_lines(run[base:], shard, chunk.offset + base)), chunk)]
        header = self._headers.get(chunk.shard)
        if isinstance(shard_format, (ParquetFormat, ArrowFormat)):
            table = shard_format.read_table(chunk, header, [self._checked(piece, chunk)], self._partitions.schema)
            table = self._partitions.add_to_table(table, chunk)
            return list(table.combine_chunks().to_batches())
        checksums = self._manifest.checksums
        checksum = None if checksums is None else int(checksums[piece])
        block = read_chunk(self._store, shard_format, header, chunk, self._manifest.schema, checksum=checksum)
        return [block_rows(block)]

    def _complete(self, rows: Iterable[dict[str, Any]], chunk: ChunkRef) -> list[dict[str, Any]]:
        """The rows of a chunk with the values that stand in its path."""
        values = self._partitions.values(chunk)
        return [{**row, **values} for row in rows] if values else list(rows)

    def _checked(self, piece: int, chunk: ChunkRef) -> memoryview:
        data = self._store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
        sums = self._manifest.checksums
        if sums is not None and xxh3_64(data) != int(sums[piece]):
            raise ChecksumError(
                chunk.shard.key,
                "the chunk's checksum is not that of the manifest; run `penstock verify`",
                offset=chunk.offset,
            )
        return data

    def _stream_lines(self, chunk: ChunkRef, codec: str) -> Iterator[list[Any]]:
        held, base = b"", 0
        with closing(decompressed_pieces(self._store, chunk.shard, codec)) as pieces:
            for piece in pieces:
                whole, feed, rest = bytes(piece).rpartition(b"\n")
                if not feed:
                    held += rest
                    continue
                run = held + whole + feed
                yield from self._parse(run, chunk, base)
                base, held = base + len(run), rest
        yield from self._parse(held, chunk, base)

    def _parse(self, run: bytes, chunk: ChunkRef, base: int) -> Iterator[list[Any]]:
        mark = 3 if base == 0 and run[:3] == b"\xef\xbb\xbf" else 0
        rows = self._complete(parsed_rows(find_lines(memoryview(run)[mark:], chunk.shard.key, base + mark)), chunk)
        yield from (rows[first : first + _ROWS] for first in range(0, len(rows), _ROWS))


def _choose_classes(manifest: Manifest, options: SourceOptions) -> tuple[str, ...]:
    """The names for the numbers that are written: those of the data set, unless others are given."""
    own, given = manifest.classes or (), options.classes
    number = None if given is None or options.is_mapped else find_difference(own, given)
    if number is not None:
        assert given is not None
        raise ConfigError(
            f"{manifest.url}: {number} in {LABEL_FIELD!r} is {own[number]!r} there, and {given[number]!r} in classes=, "
            "which does not change the numbers of a data set that is packed already; pack the folder of files that it "
            "was made of, or give map= a function that changes them"
        )
    return own if given is None or (not options.is_mapped and len(own) > len(given)) else given


def _batches(piece: int, done: Future[list[_Items]]) -> Iterator[Batch]:
    for items in done.result():
        yield Batch(piece, items)


def block_rows(block: Block) -> list[dict[str, Any]]:
    """The samples of an opened chunk; what a sample lacks is None."""
    every = np.arange(block.samples)
    columns: dict[str, Any] = {}
    for name, column in block.columns.items():
        if isinstance(column, ArrayColumn):
            # Rows of a copy: a sample must not keep the chunk alive, and tokens of neighbours may overlap.
            columns[name] = list(np.array(column.values))
        elif isinstance(column, BytesColumn):
            columns[name] = column.take(every)
        else:
            columns[name] = column.take(every)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
