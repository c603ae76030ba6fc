"""Arrow IPC files and streams: a chunk is a record batch, or a run of small ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

import pyarrow as pa
import pyarrow.types as pt

from ....storage import ByteRange, ObjectInfo, Store
from ...columns import Block, Column
from ...errors import ConfigError, FormatError
from ..schema import choose_columns, make_block, merge_columns
from ..shard import CHUNK_BYTES, ChunkRef, ChunkSpan, ShardIndex, ShardTask
from .columns import marks_nulls, schema_columns, to_columns, value_bytes
from .messages import (
    CONTINUATION,
    DICTIONARY,
    FILE_MAGIC,
    PREFIX_BYTES,
    RECORDS,
    SCHEMA,
    Message,
    MessageBlock,
    metadata_length,
    parse_footer,
    parse_message,
)

_SUFFIXES = (".arrow", ".arrows", ".feather", ".ipc")
_FILE_HEADER_BYTES = 8
_TRAILER_BYTES = 4 + len(FILE_MAGIC)
_WINDOW_BYTES, _MAX_WINDOW_BYTES = 64 << 10, 4 << 20

# What a compressed body grows to is not in the metadata; a guess for the estimate of memory.
_COMPRESSION_RATIO = 3


@dataclass(frozen=True, slots=True)
class ArrowHeader:
    """A shard's schema, and the messages of the schema and the dictionaries: what a stream starts with."""

    schema: pa.Schema
    prefix: bytes
    has_dictionaries: bool


@dataclass(frozen=True, slots=True)
class ArrowFormat:
    """Reads Arrow IPC files (.arrow, .feather of version 2) and streams (.arrows; Hugging Face's .arrow), told apart by
    their first bytes; bodies may be compressed with lz4 or zstd.

    Consecutive record batches are one chunk up to ``chunk_bytes``. A chunk is read whole, whatever its columns; those
    that are not wanted are not decompressed. Dictionaries may grow by deltas but not be replaced within a shard.
    """

    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: needs at least 1")

    @property
    def name(self) -> str:
        return "arrow"

    def config(self) -> dict[str, Any]:
        return asdict(self)

    def shards(self, store: Store, listing: Sequence[ObjectInfo]) -> list[ShardTask]:
        """Files of the names above; those in or with a name that starts with '_' or '.' are companions."""
        return [
            ShardTask(info)
            for info in listing
            if info.key.endswith(_SUFFIXES) and not any(part[0] in "_." for part in PurePosixPath(info.key).parts)
        ]

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        shard = task.info
        reader = _ShardReader(store, shard)
        schema = reader.read_schema()
        # A field is one node of a batch's metadata, and each of its children another, depth first.
        stops, count = [], 0
        for field in schema:
            count += _count_nodes(field.type)
            stops.append(count)
        widths = sum(value_bytes(field.type) or 0 for field in schema)
        nullable: set[str] = set()
        chunks: list[ChunkSpan] = []
        for block, message in reader.messages():
            if message.kind != RECORDS or message.rows == 0:
                continue
            if len(message.null_counts) != count:
                problem = (
                    f"a record batch has {len(message.null_counts)} nodes, the schema {count}; write the file again"
                )
                raise FormatError(shard.key, problem, offset=block.offset)
            for field, start, stop in zip(schema, [0, *stops], stops, strict=False):
                if any(message.null_counts[start:stop]):
                    nullable.add(field.name)
            length = block.stop - block.offset
            memory = max(block.body_bytes * (_COMPRESSION_RATIO if message.compressed else 1), widths * message.rows)
            last = chunks[-1] if chunks else None
            if (
                last is not None
                and last.offset + last.length == block.offset
                and last.length + length <= self.chunk_bytes
            ):
                samples, memory = last.samples + message.rows, last.memory + memory
                chunks[-1] = ChunkSpan(last.offset, last.length + length, samples, memory)
            else:
                chunks.append(ChunkSpan(block.offset, length, message.rows, memory))
        nullable |= {
            field.name
            for field in schema
            if field.nullable and (not marks_nulls(field.type) or pt.is_dictionary(field.type))
        }
        return ShardIndex(chunks, {"columns": schema_columns(schema, nullable, shard.key), "seen_in": shard.key})

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        return merge_columns(known, new, shard)

    def open_shard(self, store: Store, shard: ObjectInfo) -> ArrowHeader:
        reader = _ShardReader(store, shard)
        schema = reader.read_schema()
        has_dictionaries = any(_has_dictionary(field.type) for field in schema)
        dictionaries = reader.read_dictionaries() if has_dictionaries else []
        return ArrowHeader(schema, b"".join([reader.schema_message, *dictionaries]), has_dictionaries)

    def chunk_ranges(self, chunk: ChunkRef, header: ArrowHeader, columns: Sequence[str] | None) -> list[ByteRange]:
        return [chunk.byte_range]

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: ArrowHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        known, shard = schema["columns"], chunk.shard.key
        names = choose_columns(known, columns)
        if not names:
            return Block(chunk.samples, 0, {})
        (data,) = parts
        try:
            length = metadata_length(data[:PREFIX_BYTES])
            first = parse_message(data[PREFIX_BYTES : PREFIX_BYTES + length])
            if header.has_dictionaries or first.compressed:
                batches = _read_stream(header, data, names)
            else:
                batches = _read_in_place(header, data, names)
            table = pa.Table.from_batches(batches)
            _validate(table)
        except (pa.ArrowException, OSError, ValueError, KeyError) as exc:
            problem = f"its record batches cannot be read ({exc}); write the file again"
            raise FormatError(shard, problem, offset=chunk.offset) from exc
        if table.num_rows != chunk.samples:
            raise FormatError(shard, f"got {table.num_rows} rows of {chunk.samples}", offset=chunk.offset)
        found: dict[str, Column] = {}
        for name in names:
            found |= to_columns(name, table.column(name), nulls=known[name]["nulls"], shard=shard)
        return make_block(found, chunk.samples, held_bytes=data.nbytes)


def _read_in_place(header: ArrowHeader, data: memoryview, names: list[str]) -> list[pa.RecordBatch]:
    """Batches that are views of ``data``."""
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
    return [pa.ipc.read_record_batch(message, header.schema).select(names) for message in messages]


def _read_stream(header: ArrowHeader, data: memoryview, names: list[str]) -> list[pa.RecordBatch]:
    """Batches with dictionaries or compressed bodies; pyarrow wants them in one piece, so ``data`` is copied."""
    fields = [header.schema.get_field_index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    with pa.ipc.open_stream(pa.py_buffer(b"".join([header.prefix, data])), options=options) as stream:
        return list(stream)


def _validate(table: pa.Table) -> None:
    """pyarrow trusts the offsets and indices in a file, and would follow damaged ones out of the buffers.

    Numbers have none; those of strings are only used to slice, so their first and last are enough.
    """
    table.validate()
    for column in table.columns:
        if column.type.num_fields or pt.is_dictionary(column.type) or isinstance(column.type, pa.BaseExtensionType):
            column.validate(full=True)


class _ShardReader:
    """Walks the messages of one shard with ranged reads. State: the window of bytes that was read last."""

    def __init__(self, store: Store, shard: ObjectInfo) -> None:
        self._store, self._shard = store, shard
        if shard.size == 0:
            raise FormatError(shard.key, "holds no bytes; remove it or write it again")
        self._window_start, self._window = 0, memoryview(b"")
        self._window_bytes = _WINDOW_BYTES
        magic = bytes(self._read(0, min(8, shard.size)))
        self._is_file = magic.startswith(FILE_MAGIC)
        if not self._is_file and not magic.startswith(CONTINUATION):
            problem = f"starts with {magic!r}; an Arrow file with {FILE_MAGIC!r}, a stream with {CONTINUATION!r}"
            raise FormatError(shard.key, problem, offset=0)
        self.schema_message = b""

    def read_schema(self) -> pa.Schema:
        """The shard's schema; keeps its message in ``schema_message``."""
        start = _FILE_HEADER_BYTES if self._is_file else 0
        found = self._read_message(start)
        if found is None or found[1].kind != SCHEMA:
            raise FormatError(self._shard.key, "does not start with a schema; write it again", offset=start)
        self.schema_message = bytes(self._read(start, found[0].stop))
        try:
            return pa.ipc.read_schema(pa.py_buffer(self.schema_message))
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise FormatError(self._shard.key, f"its schema cannot be read ({exc})", offset=start) from exc

    def messages(self) -> Iterator[tuple[MessageBlock, Message]]:
        """Every dictionary and record batch after the schema."""
        seen: set[int] = set()
        for block, message in self._file_messages() if self._is_file else self._stream_messages():
            if message.kind == DICTIONARY:
                if message.dictionary in seen and not message.delta:
                    problem = f"replaces dictionary {message.dictionary}; write it with one dictionary a column"
                    raise FormatError(self._shard.key, problem, offset=block.offset)
                seen.add(message.dictionary)
            yield block, message

    def read_dictionaries(self) -> list[bytes]:
        blocks = [block for block, message in self.messages() if message.kind == DICTIONARY]
        ranges = [ByteRange(block.offset, block.stop) for block in blocks]
        return [bytes(data) for data in self._store.get_ranges(self._shard.key, ranges, etag=self._shard.etag)]

    def _stream_messages(self) -> Iterator[tuple[MessageBlock, Message]]:
        at = len(self.schema_message)
        while (found := self._read_message(at)) is not None:
            yield found
            at = found[0].stop

    def _file_messages(self) -> Iterator[tuple[MessageBlock, Message]]:
        size, key, etag = self._shard.size, self._shard.key, self._shard.etag
        tail = self._read(max(0, size - _TRAILER_BYTES), size)
        if bytes(tail[4:]) != FILE_MAGIC:
            problem = f"ends with {bytes(tail[4:])!r}, an Arrow file with {FILE_MAGIC!r}; it is a part of one"
            raise FormatError(key, problem, offset=max(0, size - len(FILE_MAGIC)))
        length = int.from_bytes(tail[:4], "little", signed=True)
        start = size - _TRAILER_BYTES - length
        if length <= 0 or start < _FILE_HEADER_BYTES:
            problem = f"its footer's length, {length}, points outside of the file's {size} bytes; write it again"
            raise FormatError(key, problem, offset=size - _TRAILER_BYTES)
        try:
            dictionaries, records = parse_footer(self._read(start, size - _TRAILER_BYTES))
        except ValueError as exc:
            raise FormatError(key, f"its footer is damaged ({exc}); write it again", offset=start) from exc
        blocks = [*dictionaries, *records]
        for block in blocks:
            if block.offset < _FILE_HEADER_BYTES or block.metadata_bytes < PREFIX_BYTES or block.stop > start:
                raise FormatError(key, f"its footer names {block}, outside of the data; write it again", offset=start)
        ranges = [ByteRange(block.offset, block.offset + block.metadata_bytes) for block in blocks]
        for block, data in zip(blocks, self._store.get_ranges(key, ranges, etag=etag), strict=True):
            found = self._parse(block.offset, data)
            if found is None or found[0].stop != block.stop:
                raise FormatError(key, "its footer and a message do not agree; write it again", offset=block.offset)
            yield found

    def _read_message(self, at: int) -> tuple[MessageBlock, Message] | None:
        """The message at ``at``, or None at the end of the stream."""
        size = self._shard.size
        if at == size:
            return None
        if at + PREFIX_BYTES > size:
            raise FormatError(self._shard.key, "is cut off within a message; write it again", offset=at)
        try:
            length = metadata_length(self._read(at, at + PREFIX_BYTES))
        except ValueError as exc:
            raise FormatError(self._shard.key, f"{exc}; write the file again", offset=at) from exc
        if at + PREFIX_BYTES + length > size:
            raise FormatError(self._shard.key, "is cut off within a message; write it again", offset=at)
        return self._parse(at, self._read(at, at + PREFIX_BYTES + length))

    def _parse(self, at: int, data: memoryview) -> tuple[MessageBlock, Message] | None:
        try:
            length = metadata_length(data[:PREFIX_BYTES])
            if length == 0:
                return None
            message = parse_message(data[PREFIX_BYTES : PREFIX_BYTES + length])
        except ValueError as exc:
            raise FormatError(self._shard.key, f"{exc}; write the file again", offset=at) from exc
        block = MessageBlock(at, PREFIX_BYTES + length, message.body_bytes)
        if block.stop > self._shard.size:
            problem = f"has {self._shard.size} bytes, and a message up to {block.stop}; it was cut off"
            raise FormatError(self._shard.key, problem, offset=at)
        return block, message

    def _read(self, start: int, stop: int) -> memoryview:
        """Bytes of the shard, out of a window that grows while the reads follow each other closely."""
        window_stop = self._window_start + len(self._window)
        if not (self._window_start <= start and stop <= window_stop):
            near = len(self._window) > 0 and 0 <= start - window_stop < self._window_bytes
            self._window_bytes = min(2 * self._window_bytes, _MAX_WINDOW_BYTES) if near else _WINDOW_BYTES
            byte_range = ByteRange(start, min(max(stop, start + self._window_bytes), self._shard.size))
            self._window = self._store.get(self._shard.key, byte_range, etag=self._shard.etag)
            self._window_start = start
        return self._window[start - self._window_start : stop - self._window_start]


def _count_nodes(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _count_nodes(kind.storage_type)
    if pt.is_dictionary(kind):
        return 1
    return 1 + sum(_count_nodes(kind.field(i).type) for i in range(kind.num_fields))


def _has_dictionary(kind: pa.DataType) -> bool:
    if isinstance(kind, pa.BaseExtensionType):
        return _has_dictionary(kind.storage_type)
    return pt.is_dictionary(kind) or any(_has_dictionary(kind.field(i).type) for i in range(kind.num_fields))
