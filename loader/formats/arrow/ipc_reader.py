"""Walks the messages of one Arrow IPC shard, a file or a stream, and checks that none is lost to damage."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.types as pt

from ....storage import ByteRange, ObjectInfo, Store
from ...errors import FormatError
from ..shard import refuse_empty
from .columns import check_names
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
    refuse_inner_message,
    wrap_schema,
)

_FILE_HEADER_BYTES = 8
_TRAILER_BYTES = 4 + len(FILE_MAGIC)
_WINDOW_BYTES, _MAX_WINDOW_BYTES = 64 << 10, 4 << 20
_END_MARK = CONTINUATION + bytes(4)
# Between messages there is padding to 64 bytes at most, and an end mark before the footer; no record batch fits.
_GAP_BYTES = 64 + PREFIX_BYTES


class IpcReader:
    """Reads one shard's messages with ranged reads. State: the window of bytes that was read last."""

    def __init__(self, store: Store, shard: ObjectInfo) -> None:
        self._store, self._shard = store, shard
        refuse_empty(shard)
        self._window_start, self._window = 0, memoryview(b"")
        self._window_bytes = _WINDOW_BYTES
        magic = bytes(self._read(0, min(8, shard.size)))
        self._is_file = magic.startswith(FILE_MAGIC)
        if not self._is_file and not magic.startswith(CONTINUATION):
            problem = f"starts with {magic!r}; an Arrow file starts with {FILE_MAGIC!r}, a stream with {CONTINUATION!r}"
            raise FormatError(shard.key, problem, offset=0)
        self.schema_message = b""
        self._messages_start = 0
        self.dictionaries = 0

    def read_schema(self) -> pa.Schema:
        """The shard's schema; keeps its message, and counts its ``dictionaries``."""
        start = _FILE_HEADER_BYTES if self._is_file else 0
        if self._is_file and self._begins_otherwise():
            self._take_schema_of_footer()
        else:
            found = self._read_message(start)
            if found is None or found[1].kind != SCHEMA:
                raise FormatError(self._shard.key, "does not start with a schema; write it again", offset=start)
            self.schema_message = bytes(self._read(start, found[0].stop))
            self._messages_start = found[0].stop
        try:
            schema = pa.ipc.read_schema(pa.py_buffer(self.schema_message))
            check_names(schema)
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise FormatError(self._shard.key, f"its schema cannot be read ({exc})", offset=start) from exc
        self.dictionaries = sum(_count_dictionaries(field.type) for field in schema)
        return schema

    def _begins_otherwise(self) -> bool:
        """Return whether a whole file begins with something else than a message: Polars writes its bare schema."""
        size = self._shard.size
        begin = bytes(self._read(_FILE_HEADER_BYTES, min(_FILE_HEADER_BYTES + 4, size)))
        return begin != CONTINUATION and bytes(self._read(size - len(FILE_MAGIC), size)) == FILE_MAGIC

    def _take_schema_of_footer(self) -> None:
        """The footer's schema; before the batches may lie anything but batches that the footer does not name."""
        start, footer = self._read_footer()
        try:
            self.schema_message = wrap_schema(footer)
            dictionaries, records = parse_footer(footer)
        except ValueError as exc:
            raise FormatError(self._shard.key, f"its footer is damaged ({exc}); write it again", offset=start) from exc
        first = min((block.offset for block in (*dictionaries, *records)), default=start)
        self._messages_start = min(max(first, _FILE_HEADER_BYTES), start)
        if self._messages_start > _FILE_HEADER_BYTES + 2 * len(footer) + _WINDOW_BYTES:
            problem = f"its footer names nothing up to byte {self._messages_start}, where batches may be"
            raise FormatError(self._shard.key, problem, offset=_FILE_HEADER_BYTES)
        try:
            refuse_inner_message(self._read(_FILE_HEADER_BYTES, self._messages_start))
        except ValueError as exc:
            problem = "its footer leaves out a batch before the others; write it again"
            raise FormatError(self._shard.key, problem, offset=_FILE_HEADER_BYTES) from exc

    def messages(self) -> Iterator[tuple[MessageBlock, Message]]:
        """Every dictionary and record batch after the schema, which was read before."""
        seen: set[int] = set()
        for block, message in self._file_messages() if self._is_file else self._stream_messages():
            if message.kind == DICTIONARY:
                if message.dictionary in seen and not message.delta:
                    problem = f"replaces dictionary {message.dictionary}; write it with one dictionary a column"
                    raise FormatError(self._shard.key, problem, offset=block.offset)
                seen.add(message.dictionary)
            if message.kind not in (DICTIONARY, RECORDS) or len(seen) > self.dictionaries:
                problem = f"holds a message of kind {message.kind} that its schema has no place for; write it again"
                raise FormatError(self._shard.key, problem, offset=block.offset)
            yield block, message

    def read_dictionaries(self) -> list[bytes]:
        blocks = [block for block, message in self.messages() if message.kind == DICTIONARY]
        ranges = [ByteRange(block.offset, block.stop) for block in blocks]
        return [bytes(data) for data in self._store.get_ranges(self._shard.key, ranges, etag=self._shard.etag)]

    def _stream_messages(self) -> Iterator[tuple[MessageBlock, Message]]:
        at = self._messages_start
        while (found := self._read_message(at)) is not None:
            yield found
            at = found[0].stop
        size = self._shard.size
        if at == size and bytes(self._read(size - PREFIX_BYTES, size)) == _END_MARK:
            problem = "its last message covers the stream's end mark, and maybe other messages; write it again"
            raise FormatError(self._shard.key, problem, offset=size - PREFIX_BYTES)
        if at + PREFIX_BYTES < size:
            problem = (
                f"goes on for {size - at - PREFIX_BYTES} bytes after its end mark: it is damaged, or "
                "several streams were joined; write it again, or split it"
            )
            raise FormatError(self._shard.key, problem, offset=at)

    def _read_footer(self) -> tuple[int, memoryview]:
        """Read a file's footer; returns its offset and its bytes."""
        size, key = self._shard.size, self._shard.key
        tail = self._read(max(0, size - _TRAILER_BYTES), size)
        if bytes(tail[4:]) != FILE_MAGIC:
            problem = f"ends with {bytes(tail[4:])!r}, but an Arrow file ends with {FILE_MAGIC!r}; it was cut off"
            raise FormatError(key, problem, offset=max(0, size - len(FILE_MAGIC)))
        length = int.from_bytes(tail[:4], "little", signed=True)
        start = size - _TRAILER_BYTES - length
        if length <= 0 or start < _FILE_HEADER_BYTES:
            problem = f"its footer's length, {length}, points outside of the file's {size} bytes; write it again"
            raise FormatError(key, problem, offset=size - _TRAILER_BYTES)
        return start, self._read(start, size - _TRAILER_BYTES)

    def _file_messages(self) -> Iterator[tuple[MessageBlock, Message]]:
        key, etag = self._shard.key, self._shard.etag
        start, footer = self._read_footer()
        try:
            dictionaries, records = parse_footer(footer)
        except ValueError as exc:
            raise FormatError(key, f"its footer is damaged ({exc}); write it again", offset=start) from exc
        blocks = [*dictionaries, *records]
        if any(block.metadata_bytes < PREFIX_BYTES or block.body_bytes < 0 for block in blocks):
            raise FormatError(key, "its footer is damaged (a batch of negative length); write it again", offset=start)
        kinds = [DICTIONARY] * len(dictionaries) + [RECORDS] * len(records)
        self._refuse_gaps(blocks, start)
        ranges = [ByteRange(block.offset, block.offset + block.metadata_bytes) for block in blocks]
        for block, kind, data in zip(blocks, kinds, self._store.get_ranges(key, ranges, etag=etag), strict=True):
            found = self._parse(block.offset, data)
            if found is None or found[0] != block or found[1].kind != kind:
                raise FormatError(
                    key, "its footer and the message here do not agree; write it again", offset=block.offset
                )
            yield found

    def _refuse_gaps(self, blocks: list[MessageBlock], footer_start: int) -> None:
        """Raise FormatError unless the footer's messages fill the file, from the schema to the footer."""
        key, ordered = self._shard.key, sorted(blocks, key=lambda block: block.offset)
        stops = [self._messages_start, *(block.stop for block in ordered)]
        starts = [*(block.offset for block in ordered), footer_start]
        for stop, start in zip(stops, starts, strict=True):
            if start < stop:
                problem = f"its footer names bytes {start} to {stop} twice, or beyond the data; write it again"
                raise FormatError(key, problem, offset=footer_start)
            if start - stop > _GAP_BYTES:
                problem = f"its footer names nothing in bytes {stop} to {start}, where batches may be; write it again"
                raise FormatError(key, problem, offset=footer_start)

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
            metadata = data[PREFIX_BYTES : PREFIX_BYTES + length]
            message = parse_message(metadata)
            refuse_inner_message(metadata)
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


def _count_dictionaries(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _count_dictionaries(kind.storage_type)
    if pt.is_dictionary(kind):
        return 1 + _count_dictionaries(kind.value_type)
    return sum(_count_dictionaries(kind.field(i).type) for i in range(kind.num_fields))
