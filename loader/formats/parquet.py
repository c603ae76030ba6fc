"""Parquet: a chunk is a row group, or a run of small ones; only the bytes of the wanted columns are read."""

from __future__ import annotations

import bisect
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from ...storage import ByteRange, ObjectInfo, Store
from ..errors import ConfigError, FormatError
from .arrow_columns import marks_nulls, schema_columns, to_columns, value_bytes
from .columns import choose_columns, make_block, merge_columns
from .shard import CHUNK_BYTES, Block, ChunkRef, ChunkSpan, Column, IntArray, ShardIndex, ShardTask

_SUFFIXES = (".parquet", ".pq", ".parq")
_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_TRAILER_BYTES = 8

# Most footers fit, so that one GET reads them.
_TAIL_BYTES = 64 << 10

# Two wanted columns are read in one range where less than this lies between them. Above the 8 KiB of pyarrow's own
# coalescing, so that its reads stay inside the parts.
_GAP_BYTES = 64 << 10


@dataclass(frozen=True, slots=True)
class ParquetHeader:
    """A shard's footer: ``first_rows`` (row groups + 1,) int64, ``leaves`` of each column in the order of the file."""

    footer: pq.FileMetaData
    first_rows: IntArray
    leaves: Mapping[str, range]

    def row_groups(self, chunk: ChunkRef) -> range:
        """The row groups that a chunk is.

        Raises:
            FormatError: the footer has no such run of row groups.
        """
        start = int(np.searchsorted(self.first_rows, chunk.first_row, side="right")) - 1
        stop = int(np.searchsorted(self.first_rows, chunk.first_row + chunk.samples, side="left"))
        rows = self.first_rows[[start, min(stop, len(self.first_rows) - 1)]]
        if rows.tolist() != [chunk.first_row, chunk.first_row + chunk.samples]:
            raise FormatError(
                chunk.shard.key,
                f"no row groups hold just its rows {chunk.first_row} to {chunk.first_row + chunk.samples}; "
                "index the data set anew",
                offset=chunk.offset,
            )
        return range(start, stop)


@dataclass(frozen=True, slots=True)
class ParquetFormat:
    """Reads Parquet files of any row-group layout; consecutive row groups are one chunk up to ``chunk_bytes``."""

    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: needs at least 1")

    @property
    def name(self) -> str:
        return "parquet"

    def config(self) -> dict[str, Any]:
        return asdict(self)

    def shards(self, store: Store, listing: Sequence[ObjectInfo]) -> list[ShardTask]:
        """Files named .parquet, .pq or .parq; those in or with a name that starts with '_' or '.' are companions."""
        return [
            ShardTask(info)
            for info in listing
            if info.key.endswith(_SUFFIXES) and not any(part[0] in "_." for part in PurePosixPath(info.key).parts)
        ]

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        shard = task.info
        footer, footer_start = read_footer(store, shard)
        schema = _arrow_schema(footer, shard.key)
        leaves = _leaves(schema, footer, shard.key)
        chunks: list[ChunkSpan] = []
        for span in _row_group_spans(footer, schema, leaves, shard.key, footer_start):
            last = chunks[-1] if chunks else None
            if last is not None and 0 <= span.offset - last.offset - last.length <= _GAP_BYTES:
                length = span.offset + span.length - last.offset
                if length <= self.chunk_bytes:
                    samples, memory = last.samples + span.samples, last.memory + span.memory
                    chunks[-1] = ChunkSpan(last.offset, length, samples, memory)
                    continue
            chunks.append(span)
        nullable = {
            field.name
            for field in schema
            if field.nullable and (not marks_nulls(field.type) or _may_hold_nulls(footer, leaves[field.name]))
        }
        return ShardIndex(chunks, {"columns": schema_columns(schema, nullable, shard.key), "seen_in": shard.key})

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        return merge_columns(known, new, shard)

    def open_shard(self, store: Store, shard: ObjectInfo) -> ParquetHeader:
        footer, _ = read_footer(store, shard)
        rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        first_rows = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        return ParquetHeader(footer, first_rows, _leaves(_arrow_schema(footer, shard.key), footer, shard.key))

    def chunk_ranges(self, chunk: ChunkRef, header: ParquetHeader, columns: Sequence[str] | None) -> list[ByteRange]:
        if columns is None:
            return [chunk.byte_range]
        chosen = choose_columns(header.leaves, columns)
        # pyarrow takes a name for that of a struct, too: asked for 'a' it also reads a column named 'a.b'.
        prefixes = tuple(f"{name}." for name in chosen)
        wanted = [
            leaf
            for name, leaves in header.leaves.items()
            if name in chosen or name.startswith(prefixes)
            for leaf in leaves
        ]
        ranges: list[ByteRange] = []
        for start, stop in sorted(
            _column_range(header.footer.row_group(group).column(leaf))
            for group in header.row_groups(chunk)
            for leaf in wanted
        ):
            if ranges and start - ranges[-1].stop <= _GAP_BYTES:
                ranges[-1] = ByteRange(ranges[-1].start, max(stop, ranges[-1].stop))
            else:
                ranges.append(ByteRange(start, stop))
        return ranges

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: ParquetHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        known = schema["columns"]
        names = choose_columns(known, columns)
        shard = chunk.shard.key
        groups = header.row_groups(chunk)
        if not names:
            return Block(chunk.samples, 0, {})
        ranges = self.chunk_ranges(chunk, header, columns)
        source = SparseFile(chunk.shard.size, [(r.start, part) for r, part in zip(ranges, parts, strict=True)])
        try:
            # pre_buffer makes one read of the source a part, in place of one a column: each needs the GIL for a moment,
            # which a busy Python thread elsewhere may keep for milliseconds.
            # Checksums of pages are compared where the writer put some.
            with pq.ParquetFile(
                pa.PythonFile(source, "r"), metadata=header.footer, pre_buffer=True, page_checksum_verification=True
            ) as file:
                table = file.read_row_groups(groups, columns=names, use_threads=False)
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise FormatError(
                shard,
                f"row groups {groups.start} to {groups.stop} cannot be decoded ({exc}); write the file again",
                offset=chunk.offset,
            ) from exc
        if table.num_rows != chunk.samples:
            raise FormatError(shard, f"got {table.num_rows} rows of {chunk.samples}", offset=chunk.offset)
        found: dict[str, Column] = {}
        for name in names:
            found |= to_columns(name, table.column(name), nulls=known[name]["nulls"], shard=shard)
        return make_block(found, chunk.samples)


class SparseFile(io.RawIOBase):
    """A file of ``size`` bytes of which only ``parts`` (offset, bytes) can be read; what pyarrow needs of a file.

    Its position is the only state; each chunk that is opened has its own.
    """

    def __init__(self, size: int, parts: Sequence[tuple[int, memoryview]]) -> None:
        self._size = size
        self._starts = [start for start, _ in parts]
        self._parts = [pa.py_buffer(part) for _, part in parts]
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def size(self) -> int:
        return self._size

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        return self._at

    def read_buffer(self, size: int) -> pa.Buffer:
        """The next ``size`` bytes without a copy. Raises OSError where they are not all in one part."""
        index = bisect.bisect_right(self._starts, self._at) - 1
        skip = self._at - self._starts[index] if index >= 0 else 0
        if index < 0 or skip + size > self._parts[index].size:
            raise OSError(f"bytes {self._at} to {self._at + size} are outside of the columns' own")
        self._at += size
        return self._parts[index].slice(skip, size)

    def read(self, size: int = -1) -> bytes:
        return self.read_buffer(size).to_pybytes()  # type: ignore[no-any-return]


def read_footer(store: Store, shard: ObjectInfo) -> tuple[pq.FileMetaData, int]:
    """A shard's footer and the offset it starts at; one GET, a second one where it is longer than 64 KiB.

    Raises:
        FormatError: there is none, it is encrypted or damaged.
    """
    if shard.size == 0:
        raise FormatError(shard.key, "holds no bytes; remove it or write it again")
    if shard.size < len(_MAGIC) + _TRAILER_BYTES:
        raise FormatError(shard.key, f"{shard.size} bytes are too few for a Parquet file")
    tail_start = max(0, shard.size - _TAIL_BYTES)
    tail = store.get(shard.key, ByteRange(tail_start, shard.size), etag=shard.etag)
    magic = bytes(tail[-4:])
    if magic == _ENCRYPTED_MAGIC:
        raise FormatError(shard.key, "its footer is encrypted; decrypt the data set first", offset=shard.size - 4)
    if magic != _MAGIC:
        problem = f"ends with {magic!r}, a Parquet file with {_MAGIC!r}; it is no Parquet file, or a part of one"
        raise FormatError(shard.key, problem, offset=shard.size - 4)
    length = int.from_bytes(tail[-_TRAILER_BYTES:-4], "little")
    start = shard.size - _TRAILER_BYTES - length
    if start < len(_MAGIC):
        problem = f"its footer's length, {length}, points outside of the file's {shard.size} bytes; write it again"
        raise FormatError(shard.key, problem, offset=shard.size - _TRAILER_BYTES)
    if start < tail_start:
        head = store.get(shard.key, ByteRange(start, tail_start), etag=shard.etag)
        tail, tail_start = memoryview(b"".join((head, tail))), start
    try:
        # What starts with the footer reads as a file of its own: pyarrow looks at a file's end only.
        footer = pq.read_metadata(pa.BufferReader(pa.py_buffer(tail[start - tail_start :])))
    except (pa.ArrowException, OSError, ValueError) as exc:
        raise FormatError(shard.key, f"its footer is damaged ({exc}); write it again", offset=start) from exc
    return footer, start


def _arrow_schema(footer: pq.FileMetaData, shard: str) -> pa.Schema:
    try:
        return footer.schema.to_arrow_schema()
    except (pa.ArrowException, ValueError) as exc:
        raise FormatError(shard, f"its schema has no Arrow form ({exc})") from exc


def _leaves(schema: pa.Schema, footer: pq.FileMetaData, shard: str) -> dict[str, range]:
    """The Parquet columns (leaves of the schema's tree, in order) that each top-level column is stored as."""
    leaves, start = {}, 0
    for field in schema:
        stop = start + _count_leaves(field.type)
        leaves[field.name] = range(start, stop)
        start = stop
    if start != footer.num_columns:
        raise FormatError(shard, f"its schema has {start} leaves and its footer {footer.num_columns}; write it again")
    return leaves


def _count_leaves(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _count_leaves(kind.storage_type)
    if pt.is_dictionary(kind) or kind.num_fields == 0:
        return 1
    return sum(_count_leaves(kind.field(i).type) for i in range(kind.num_fields))


def _column_range(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size


def _row_group_spans(
    footer: pq.FileMetaData, schema: pa.Schema, leaves: Mapping[str, range], shard: str, footer_start: int
) -> Iterator[ChunkSpan]:
    """The row groups that hold rows. Raises FormatError where one lies outside of the file's data."""
    widths = [(leaves[field.name], value_bytes(field.type)) for field in schema]
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        rows = group.num_rows
        if rows == 0:
            continue
        columns = [group.column(leaf) for leaf in range(group.num_columns)]
        ranges = [_column_range(column) for column in columns]
        start, stop = min(r[0] for r in ranges), max(r[1] for r in ranges)
        if rows < 0 or start < len(_MAGIC) or stop > footer_start or any(b < a for a, b in ranges):
            raise FormatError(
                shard,
                f"row group {index} is said to be {rows} rows in bytes {start} to {stop}, but the data ends at "
                f"{footer_start}; write the file again",
                offset=footer_start,
            )
        if any(column.file_path for column in columns):
            raise FormatError(shard, f"row group {index} is in another file; give that file", offset=footer_start)
        # A value of variable length also takes its start and stop, int64 each.
        memory = sum(
            rows * width
            if width is not None
            else 16 * rows + sum(columns[leaf].total_uncompressed_size for leaf in own)
            for own, width in widths
        )
        yield ChunkSpan(start, stop - start, rows, memory)


def _may_hold_nulls(footer: pq.FileMetaData, leaves: range) -> bool:
    """Whether the footer leaves open that a column holds a null: it counts some, or does not count."""
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        for leaf in leaves:
            statistics = group.column(leaf).statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count > 0:
                return True
    return False
