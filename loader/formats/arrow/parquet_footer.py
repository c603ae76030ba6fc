"""A Parquet shard's footer: read with a GET or two, checked before it is followed, and asked where the columns lie."""

from __future__ import annotations

import bisect
import io
import mmap
import os
import threading
from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from ....storage import ByteRange, ObjectInfo, Store
from ...errors import FormatError
from ..shard import ChunkSpan
from .columns import check_names, value_bytes

_MAGIC, _ENCRYPTED_MAGIC = b"PAR1", b"PARE"
_TRAILER_BYTES = 8
_FIXED = "FIXED_LEN_BYTE_ARRAY"
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}

# Most footers fit, so that one GET reads them.
_TAIL_BYTES = 64 << 10


# Memory that is never written, and so takes none.
_ZEROS = memoryview(mmap.mmap(-1, 16 << 20, prot=mmap.PROT_READ))
_NO_KEY = "Cannot decrypt ColumnMetadata"
_NO_PAGE = "Deserializing page header failed"

# pyarrow hands the check of a footer to a thread of its own and back, each time through the GIL: dozens of threads that
# check at once wait for one another longer than for the store.
_CHECKING = threading.Lock()


def _renew_lock_in_child() -> None:
    global _CHECKING
    _CHECKING = threading.Lock()


os.register_at_fork(after_in_child=_renew_lock_in_child)


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
    _check_footer(footer, shard, start)
    return footer, start


class _SoundFooterError(OSError):
    """pyarrow went through the footer and came to reading data."""


class _DatalessFile(SparseFile):
    def read_buffer(self, size: int) -> pa.Buffer:
        raise _SoundFooterError


def _check_footer(footer: pq.FileMetaData, shard: ObjectInfo, start: int) -> None:
    """Make pyarrow visit every column of every row group in the one way that raises.

    Its accessors (``row_group(i).column(j)``) end the process on a footer that is damaged within: they let a C++
    exception out of a function that promises none. Finding the ranges to pre-buffer visits the same parts, and catches.
    """
    groups = range(footer.num_row_groups)
    if not groups or not footer.num_columns or (shard.size <= len(_ZEROS) and _reaches_pages(footer, shard.size)):
        return
    try:
        dataless = pa.PythonFile(_DatalessFile(shard.size, []), "r")
        with _CHECKING, pq.ParquetFile(dataless, metadata=footer, pre_buffer=True) as file:
            file.read_row_groups(groups, use_threads=False)
    except _SoundFooterError as reached:
        # pyarrow's reader keeps the exception, whose frames keep the reader: a cycle that is never collected.
        reached.__traceback__ = None
    except (pa.ArrowException, OSError, ValueError) as exc:
        problem = f"its footer is damaged ({exc}); write it again"
        if _NO_KEY in str(exc):
            problem = "some of its columns are encrypted, which Parquet's footer tells; decrypt the data set first"
        raise FormatError(shard.key, problem, offset=start) from exc


def _reaches_pages(footer: pq.FileMetaData, size: int) -> bool:
    """Return whether pyarrow, given zeros for data, finds nothing wrong before it comes to a page.

    A file object in Python takes twice the CPU time, and waits for the GIL among many threads. An error that is not
    recognised as a page's proves nothing: if another pyarrow words it differently, that costs only time.
    """
    try:
        with pq.ParquetFile(pa.BufferReader(pa.py_buffer(_ZEROS[:size])), metadata=footer, pre_buffer=True) as file:
            file.read_row_groups(range(footer.num_row_groups), use_threads=False)
    except (pa.ArrowException, OSError, ValueError) as exc:
        return _NO_PAGE in str(exc)
    return False


def arrow_schema(footer: pq.FileMetaData, shard: str) -> pa.Schema:
    """The schema that pyarrow reads the shard with. Raises FormatError where there is none."""
    try:
        schema = footer.schema.to_arrow_schema()
        check_names(schema)
    except (pa.ArrowException, ValueError) as exc:
        raise FormatError(shard, f"its schema cannot be read as Arrow's ({exc}); write it again") from exc
    return schema


def column_leaves(schema: pa.Schema, footer: pq.FileMetaData, shard: str) -> dict[str, range]:
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


def column_range(column: pq.ColumnChunkMetaData) -> tuple[int, int]:
    """The bytes, start and stop, of one column of a row group."""
    start = column.data_page_offset
    if column.has_dictionary_page and 0 < column.dictionary_page_offset < start:
        start = column.dictionary_page_offset
    return start, start + column.total_compressed_size


def row_group_spans(
    footer: pq.FileMetaData, schema: pa.Schema, leaves: Mapping[str, range], shard: str, footer_start: int
) -> Iterator[ChunkSpan]:
    """The row groups that hold rows. Raises FormatError where one lies outside of the file's data."""
    widths = [(leaves[field.name], value_bytes(field.type)) for field in schema]
    if not widths:
        raise FormatError(shard, "has no columns; leave it out of the data set")
    types = [footer.schema.column(leaf).physical_type for leaf in range(footer.num_columns)]
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        rows = group.num_rows
        if rows == 0:
            continue
        columns = [group.column(leaf) for leaf in range(group.num_columns)]
        if [column.physical_type for column in columns] != types:
            problem = f"row group {index} has columns of other types than its schema; write the file again"
            raise FormatError(shard, problem, offset=footer_start)
        ranges = [column_range(column) for column in columns]
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
        memory = sum(column_bytes(footer, group, own, width) for own, width in widths)
        yield ChunkSpan(start, stop - start, rows, memory)


def column_bytes(footer: pq.FileMetaData, group: pq.RowGroupMetaData, leaves: range, width: int | None) -> int:
    """About how many bytes a column of a row group takes once opened; ``width``: of a value, None where it varies.

    Text and binaries stay what they are in the file, values or indices into a dictionary; all else is laid out.
    """
    if width is not None:
        return int(group.num_rows * width)
    # A value of variable length also takes its start and stop, int64 each.
    total = 16 * group.num_rows
    for leaf in leaves:
        column, kind = group.column(leaf), footer.schema.column(leaf)
        each = kind.length if kind.physical_type == _FIXED else _WIDTHS.get(kind.physical_type, 0)
        total += max(column.total_uncompressed_size, column.num_values * each)
    return int(total)


def value_width(kind: pq.ColumnSchema) -> int:
    """The fewest bytes that a value takes where it is written plainly; of text and binaries, its length's four."""
    return max(1, kind.length) if kind.physical_type == _FIXED else _WIDTHS.get(kind.physical_type, 4)


def may_hold_nulls(footer: pq.FileMetaData, leaves: range) -> bool:
    """Return whether a column may hold nulls by the footer: it counts some, or does not count."""
    for index in range(footer.num_row_groups):
        group = footer.row_group(index)
        for leaf in leaves if group.num_rows else ():
            statistics = group.column(leaf).statistics
            if statistics is None or not statistics.has_null_count or statistics.null_count > 0:
                return True
    return False


_DICTIONARY_PAGE = 2
_I32, _STRUCT = 5, 12
# A page of values as they are spends 4 bytes on each length; indices into a dictionary are 32 bits at most.
_INDEX_BYTES = 4.1
_REPEATS = 2
PAGE_HEADER_BYTES = 64  # more than the fields of a dictionary page's header that are read


def repeats_values(column: pq.ColumnChunkMetaData, header: bytes) -> bool:
    """Return whether text or binaries take much less memory as indices into their dictionary than as values.

    That is so where the column holds hardly anything but indices, or where its values, as long as the dictionary's on
    average, would take more than twice its pages. ``header`` begins with the header of the dictionary's page.
    """
    facts = read_dictionary_facts(header)
    if facts is None:
        return False
    size, entries = facts
    index_bytes = column.total_uncompressed_size - size
    mean = size / max(1, entries)
    return bool(
        index_bytes <= _INDEX_BYTES * column.num_values
        or column.num_values * mean > _REPEATS * column.total_uncompressed_size
    )


def read_dictionary_facts(header: bytes) -> tuple[int, int] | None:
    """Uncompressed bytes and number of values of a dictionary page; None where the bytes are no such page's header.

    The header is a PageHeader of parquet.thrift in Thrift's compact protocol.
    """
    try:
        fields: dict[int, int] = {}
        stream = iter(header)
        for number, kind in _fields(stream):
            if kind == _I32:
                fields[number] = _zigzag(stream)
            elif kind == _STRUCT and number == 7:
                inner = next(_fields(stream), (0, 0))
                is_page = fields.get(1) == _DICTIONARY_PAGE and inner == (1, _I32)
                return (fields[2], _zigzag(stream)) if is_page else None
            else:
                return None
    except (StopIteration, RuntimeError, KeyError):  # a generator turns the end of its stream into RuntimeError
        pass
    return None


def _fields(stream: Iterator[int]) -> Iterator[tuple[int, int]]:
    """Number and type of each field of a struct; the caller reads its value off the stream."""
    number = 0
    while (byte := next(stream)) != 0:
        number = number + (byte >> 4) if byte >> 4 else _zigzag(stream)
        yield number, byte & 15


def _zigzag(stream: Iterator[int]) -> int:
    value = shift = 0
    while True:
        byte = next(stream)
        value |= (byte & 127) << shift
        if byte < 128:
            return (value >> 1) ^ -(value & 1)
        shift += 7
