"""The few facts of Arrow's IPC metadata that pyarrow does not show: where the messages lie, their rows and null counts.

Layouts from Arrow's Message.fbs, File.fbs and Schema.fbs, and from FlatBuffers' binary format. Pure functions of bytes
that may be damaged, so every read is checked and raises ValueError.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace

FILE_MAGIC = b"ARROW1"
CONTINUATION = b"\xff\xff\xff\xff"
PREFIX_BYTES = 8
# The coarsest that writers pad buffers to.
_ALIGNMENT = 64
# Zstandard's blocks of 128 KiB take 4 bytes at least (RFC 8878, 3.1.1.2); lz4 saves less.
_MAX_RATIO = 1 << 15
_WRAPPING_BYTES = 32

SCHEMA, DICTIONARY, RECORDS = 1, 2, 3


@dataclass(frozen=True, slots=True)
class Message:
    """One message.

    ``kind`` (SCHEMA, DICTIONARY, RECORDS or another), ``rows``, the ``lengths`` and ``null_counts`` of its nodes in
    depth-first order, whether the body is ``compressed``, where its ``buffers`` lie in it (start, length), and for a
    dictionary, whose values are a record batch, its id and whether it is a delta.
    """

    kind: int
    body_bytes: int
    rows: int = 0
    lengths: tuple[int, ...] = ()
    null_counts: tuple[int, ...] = ()
    compressed: bool = False
    dictionary: int = -1
    delta: bool = False
    buffers: tuple[tuple[int, int], ...] = ()

    def opened_bytes(self, body: memoryview) -> int:
        """Bytes of the body's buffers once decompressed: each compressed one begins with its size, or with -1.

        Raises ValueError where no codec could have made a buffer so small.
        """
        if not self.compressed:
            return self.body_bytes
        sizes = [struct.unpack_from("<q", body, start)[0] if length >= 8 else 0 for start, length in self.buffers]
        stored = [length - 8 for _, length in self.buffers]
        if any(size > max(held, 1) * _MAX_RATIO for size, held in zip(sizes, stored, strict=True)):
            raise ValueError(f"a record batch with a buffer of {max(sizes)} bytes in {self.body_bytes}")
        return sum(size if size >= 0 else held for size, held in zip(sizes, stored, strict=True))


@dataclass(frozen=True, slots=True)
class MessageBlock:
    """Position of a message: ``metadata_bytes`` (with the prefix) from ``offset``, then ``body_bytes``."""

    offset: int
    metadata_bytes: int
    body_bytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.metadata_bytes + self.body_bytes


def metadata_length(prefix: bytes | memoryview) -> int:
    """Bytes of metadata after the 8 bytes of a message's prefix; 0 at the end of a stream."""
    if bytes(prefix[:4]) != CONTINUATION or len(prefix) < PREFIX_BYTES:
        raise ValueError(f"expected a message, which starts with {CONTINUATION!r}, found {bytes(prefix[:4])!r}")
    (length,) = struct.unpack_from("<i", prefix, 4)
    if length < 0:
        raise ValueError(f"a message with {length} bytes of metadata")
    return int(length)


def body_bytes(metadata: memoryview) -> int:
    """Length of the body that follows a message's metadata."""
    length = _root(metadata).number(3, "<q")
    if length < 0:
        raise ValueError(f"a message with a body of {length} bytes")
    return length


def parse_message(metadata: memoryview) -> Message:
    """A message's metadata, without its prefix."""
    table = _root(metadata)
    kind, length = table.number(1, "<B"), body_bytes(metadata)
    header = table.table(2)
    if kind == DICTIONARY and header is not None:
        values, delta = header.table(1), bool(header.number(2, "<B"))
        found = Message(kind, length) if values is None else _parse_records(kind, length, values)
        return replace(found, dictionary=header.number(0, "<q"), delta=delta)
    if kind != RECORDS or header is None:
        return Message(kind, length)
    return _parse_records(kind, length, header)


def _parse_records(kind: int, length: int, header: _Table) -> Message:
    """Parse the table of a record batch; the values of a dictionary are one, too."""
    rows = header.number(0, "<q")
    if rows < 0:
        raise ValueError(f"a record batch of {rows} rows")
    buffers = tuple((start, size) for start, size in header.structs(2, "<qq"))
    if any(start < 0 or size < 0 for start, size in buffers):
        raise ValueError("a record batch with a buffer of negative place or length")
    used = max((start + size for start, size in buffers), default=0)
    if not 0 <= length - used < _ALIGNMENT:
        raise ValueError(f"a record batch of {length} bytes, whose buffers end at byte {used}")
    nodes = header.structs(1, "<qq")
    lengths, nulls = tuple(count for count, _ in nodes), tuple(count for _, count in nodes)
    return Message(kind, length, rows, lengths, nulls, compressed=_is_compressed(header), buffers=buffers)


def holds_compressed(metadata: memoryview) -> bool:
    """Return whether a message's body, a record batch or a dictionary's values, is compressed."""
    table = _root(metadata)
    kind, header = table.number(1, "<B"), table.table(2)
    if kind == DICTIONARY and header is not None:
        header = header.table(1)
    return kind in (DICTIONARY, RECORDS) and header is not None and _is_compressed(header)


def _is_compressed(records: _Table) -> bool:
    return records.table(3) is not None


def refuse_inner_message(metadata: memoryview) -> None:
    """Raise ValueError where metadata holds a message, as it does when a damaged length reaches over the next ones."""
    data, at = bytes(metadata), 0
    while (at := data.find(CONTINUATION, at)) >= 0:
        (length,) = struct.unpack("<i", data[at + 4 : at + PREFIX_BYTES].ljust(4, b"\xff"))
        try:
            inner = parse_message(metadata[at + PREFIX_BYTES : at + PREFIX_BYTES + length]) if length > 0 else None
        except ValueError:
            inner = None
        if inner is not None and inner.kind in (DICTIONARY, RECORDS):
            raise ValueError(f"metadata of {len(data)} bytes, which cover another message")
        at += 1


def is_big_endian(schema_message: bytes) -> bool:
    """Return whether the values that follow a schema's message, with its prefix, are big-endian."""
    header = _root(memoryview(schema_message)[PREFIX_BYTES:]).table(2)
    return header is not None and header.number(0, "<h") == 1


def wrap_schema(footer: memoryview) -> bytes:
    """The schema of a file's footer as a message with its prefix, as streams and most files begin with.

    Offsets are relative in FlatBuffers, so that a Message can be put before the footer, and name a table in it.
    """
    table = _root(footer)
    schema = table.table(1)
    if schema is None or schema.at >= len(footer):
        raise ValueError("a footer without a schema")
    # Where the root lies; its vtable (two sizes, and where it has version, header's type and header); the root: the way
    # back to its vtable, the header's place, version and type.
    head = struct.pack("<I5H2x", 16, 10, 12, 8, 10, 4)
    head += struct.pack("<iIhB5x", 12, _WRAPPING_BYTES - 20 + schema.at, table.number(0, "<h"), SCHEMA)
    metadata = head + bytes(footer)
    metadata += bytes(-len(metadata) % 8)
    return CONTINUATION + struct.pack("<i", len(metadata)) + metadata


def parse_footer(footer: memoryview) -> tuple[list[MessageBlock], list[MessageBlock]]:
    """The dictionaries and the record batches of a file, in order."""
    table = _root(footer)
    dictionaries, records = (
        [MessageBlock(offset, metadata, body) for offset, metadata, body in table.structs(field, "<qi4xq")]
        for field in (2, 3)
    )
    return dictionaries, records


@dataclass(frozen=True, slots=True)
class _Table:
    """A FlatBuffers table at ``at`` of ``data``; fields are numbered as in the schema, a union takes two numbers."""

    data: memoryview
    at: int

    def number(self, field: int, form: str) -> int:
        at = self._find(field)
        return 0 if at is None else _unpack(form, self.data, at)[0]

    def table(self, field: int) -> _Table | None:
        at = self._find(field)
        return None if at is None else _Table(self.data, at + _unpack("<I", self.data, at)[0])

    def structs(self, field: int, form: str) -> list[tuple[int, ...]]:
        at = self._find(field)
        if at is None:
            return []
        at += _unpack("<I", self.data, at)[0]
        (count,) = _unpack("<I", self.data, at)
        stop = at + 4 + count * struct.calcsize(form)
        if stop > len(self.data):
            raise ValueError(f"a vector up to byte {stop} of {len(self.data)}")
        return list(struct.iter_unpack(form, self.data[at + 4 : stop]))

    def _find(self, field: int) -> int | None:
        vtable = self.at - _unpack("<i", self.data, self.at)[0]
        slot = 4 + 2 * field
        if slot >= _unpack("<H", self.data, vtable)[0]:
            return None
        (offset,) = _unpack("<H", self.data, vtable + slot)
        return self.at + offset if offset else None


def _root(data: memoryview) -> _Table:
    return _Table(data, _unpack("<I", data, 0)[0])


def _unpack(form: str, data: memoryview, at: int) -> tuple[int, ...]:
    # A negative offset would count from the end.
    if at < 0 or at + struct.calcsize(form) > len(data):
        raise ValueError(f"metadata points at byte {at} of {len(data)}")
    return struct.unpack_from(form, data, at)
