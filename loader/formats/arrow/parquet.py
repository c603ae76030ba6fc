"""Parquet: a chunk is a row group, or a run of small ones; only the bytes of the wanted columns are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.types as pt

from ....storage import ByteRange, ObjectInfo, Store
from ...columns import Block, IntArray
from ...errors import FormatError
from ..schema import choose_columns, columns_here
from ..shard import (
    CHUNK_BYTES,
    SUFFIXES,
    BaseFormat,
    ChunkRef,
    ShardIndex,
    ShardTask,
    join_spans,
    refuse_change,
    refuse_large,
)
from .blocks import batch_block, table_block, typed_kind, typed_table
from .columns import UntoldNullsError, has_offsets, marks_nulls, schema_columns, value_bytes
from .parquet_footer import (
    PAGE_HEADER_BYTES,
    SparseFile,
    arrow_schema,
    column_bytes,
    column_leaves,
    column_range,
    may_hold_nulls,
    read_dictionary_facts,
    read_footer,
    repeats_values,
    row_group_spans,
    value_width,
)

# Two wanted columns are read as one range where less than this lies between them. It is more than the 8 KiB of
# pyarrow's own coalescing, so that its reads stay inside the parts.
_GAP_BYTES = 64 << 10
# Rows of nested columns, whose opened size is not known before, are opened and counted this many at a time.
_COUNTED_ROWS = 4096


@dataclass(frozen=True, slots=True)
class ParquetHeader:
    """A shard's footer: ``first_rows`` (row groups + 1,) int64, ``leaves`` of each column in the order of the file."""

    footer: pq.FileMetaData
    schema: pa.Schema
    first_rows: IntArray
    leaves: Mapping[str, range]

    @property
    def nbytes(self) -> int:
        """An estimate from measurements: pyarrow's objects are about ten times as large as the footer's bytes."""
        columns, groups = self.footer.num_columns, self.footer.num_row_groups
        return int(10_000 + 1600 * columns + 800 * columns * groups + 2 * self.footer.serialized_size)

    def row_groups(self, chunk: ChunkRef) -> list[int]:
        """The row groups that make up a chunk, without those of no rows, whose bytes may lie anywhere.

        Raises:
            FormatError: the footer has no such run of row groups.
        """
        start = int(np.searchsorted(self.first_rows, chunk.first_row, side="right")) - 1
        stop = int(np.searchsorted(self.first_rows, chunk.first_row + chunk.samples, side="left"))
        rows = self.first_rows[[start, min(stop, len(self.first_rows) - 1)]]
        if rows.tolist() != [chunk.first_row, chunk.first_row + chunk.samples]:
            raise FormatError(
                chunk.shard.key,
                f"no run of row groups holds exactly its rows {chunk.first_row} to {chunk.first_row + chunk.samples}; "
                "index the data set again",
                offset=chunk.offset,
            )
        return [group for group in range(start, stop) if self.first_rows[group] < self.first_rows[group + 1]]


@dataclass(frozen=True, slots=True)
class ParquetFormat(BaseFormat):
    """Reads Parquet files of any row-group layout; consecutive row groups are one chunk up to ``chunk_bytes``.

    Shards may differ in encodings (dictionary, large_string), and ``null`` takes the type of the others. Times inside
    lists, structs and maps are Python's, to the microsecond, or if finer ``numpy.datetime64`` and
    ``numpy.timedelta64``. A struct of ``bytes`` and ``path`` (Hugging Face's images) is its bytes; a path without bytes
    is refused.

    Refused, with a ``FormatError`` or ``DatasetError``: a column that some shards lack, unless ``columns=`` leaves it
    out; run ends, permuted tensors and damaged footers.
    """

    name: ClassVar[str] = "parquet"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["parquet"]
    may_lack_columns: ClassVar[bool] = True

    chunk_bytes: int = CHUNK_BYTES

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        shard = task.info
        footer, footer_start = read_footer(store, shard)
        schema = arrow_schema(footer, shard.key)
        leaves = column_leaves(schema, footer, shard.key)
        spans = row_group_spans(footer, schema, leaves, shard.key, footer_start)
        chunks = join_spans(spans, self.chunk_bytes, _GAP_BYTES)
        nullable = {
            field.name
            for field in schema
            if _may_be_null(field) and (not marks_nulls(field.type) or may_hold_nulls(footer, leaves[field.name]))
        }
        return ShardIndex(chunks, {"columns": schema_columns(schema, nullable, shard.key), "seen_in": shard.key})

    def open_shard(self, store: Store, shard: ObjectInfo) -> ParquetHeader:
        footer, _ = read_footer(store, shard)
        rows = [footer.row_group(i).num_rows for i in range(footer.num_row_groups)]
        first_rows = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        schema = arrow_schema(footer, shard.key)
        return ParquetHeader(footer, schema, first_rows, column_leaves(schema, footer, shard.key))

    def chunk_ranges(self, chunk: ChunkRef, header: ParquetHeader, columns: Sequence[str] | None) -> list[ByteRange]:
        if columns is None:
            return [chunk.byte_range]
        chosen = choose_columns(header.leaves, columns)
        # pyarrow takes a name for a path into a struct, too: asked for 'a' it also reads a column named 'a.b', and
        # asked for 'a.b' the field 'b' of a column named 'a'.
        prefixes = tuple(f"{name}." for name in chosen)
        dotted = [name for name in chosen if "." in name]
        wanted = [
            leaf
            for name, leaves in header.leaves.items()
            if name in chosen or name.startswith(prefixes) or any(other.startswith(f"{name}.") for other in dotted)
            for leaf in leaves
        ]
        ranges: list[ByteRange] = []
        for start, stop in sorted(
            column_range(header.footer.row_group(group).column(leaf))
            for group in header.row_groups(chunk)
            for leaf in wanted
        ):
            if ranges and start - ranges[-1].stop <= _GAP_BYTES:
                ranges[-1] = ByteRange(ranges[-1].start, max(stop, ranges[-1].stop))
            else:
                ranges.append(ByteRange(start, stop))
        return ranges

    def chunk_parts(self, chunk: ChunkRef, header: ParquetHeader) -> list[ByteRange]:
        """Each column of each row group, in the order of the footer."""
        groups = (header.footer.row_group(index) for index in header.row_groups(chunk))
        return [ByteRange(*column_range(group.column(leaf))) for group in groups for leaf in range(group.num_columns)]

    def opened_bytes(
        self, chunk: ChunkRef, header: ParquetHeader, columns: Sequence[str] | None, schema: Mapping[str, Any]
    ) -> int:
        # What is fetched stays until all of it is opened.
        total = 0
        for group in map(header.footer.row_group, header.row_groups(chunk)):
            for name in choose_columns(header.leaves, columns):
                leaves = header.leaves[name]
                kind = typed_kind(header.schema.field(name).type, schema["columns"][name]["type"])
                total += column_bytes(header.footer, group, leaves, value_bytes(kind))
                total += sum(group.column(leaf).total_compressed_size for leaf in leaves)
        return total

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: ParquetHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        known = schema["columns"]
        names = columns_here(known, columns, header.leaves)
        if not names:
            return Block(chunk.samples, 0, {})
        table = self._read(chunk, header, parts, columns, names, share=True)
        with _explained(header):
            return table_block(table.select(names), chunk, known)

    @property
    def opens_pieces(self) -> bool:
        return True

    def open_pieces(
        self,
        chunk: ChunkRef,
        header: ParquetHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
        rows: int,
    ) -> Iterator[Block]:
        known = schema["columns"]
        names = columns_here(known, columns, header.leaves)
        with self._opened(chunk, header, parts, columns, names, share=True) as (file, groups, _):
            for batch in _batches(file, header, groups, names, rows):
                with _explained(header):
                    block = batch_block(batch.select(names), chunk, known)
                yield block

    def read_table(
        self, chunk: ChunkRef, header: ParquetHeader, parts: Sequence[memoryview], schema: Mapping[str, Any]
    ) -> pa.Table:
        """All columns of a chunk as they are stored. Raises FormatError as ``open_chunk`` does."""
        table = self._read(
            chunk, header, parts, None, columns_here(schema["columns"], None, header.leaves), share=False
        )
        refuse_change(chunk, table.num_rows)
        return typed_table(table, chunk, schema["columns"])

    def _read(
        self,
        chunk: ChunkRef,
        header: ParquetHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        names: list[str],
        *,
        share: bool,
    ) -> pa.Table:
        """The columns as a table; with ``share``, text that many rows share as a dictionary."""
        with self._opened(chunk, header, parts, columns, names, share=share) as (file, groups, shared):
            if all(has_offsets(header.schema.field(name).type) for name in shared):
                return _read_groups(file, groups, names)
            return _read_counted(file, header, groups, names, chunk)

    @contextmanager
    def _opened(
        self,
        chunk: ChunkRef,
        header: ParquetHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        names: list[str],
        *,
        share: bool,
    ) -> Iterator[tuple[pq.ParquetFile, list[int], list[str]]]:
        """A chunk as pyarrow reads it, its row groups, and the columns whose values rows share."""
        groups = header.row_groups(chunk)
        ranges = self.chunk_ranges(chunk, header, columns)
        source = SparseFile(chunk.shard.size, [(r.start, part) for r, part in zip(ranges, parts, strict=True)])
        try:
            # pre_buffer reads the source once per part instead of once per column: each read needs the GIL, which a
            # busy Python thread elsewhere may hold for milliseconds. Page checksums are compared where there are any.
            _refuse_long_dictionaries(header, groups, names, source, chunk)
            shared = _repeating(header, groups, names, source) if share else []
            with pq.ParquetFile(
                pa.PythonFile(source, "r"),
                metadata=header.footer,
                read_dictionary=[name for name in shared if has_offsets(header.schema.field(name).type)],
                pre_buffer=True,
                page_checksum_verification=True,
            ) as file:
                yield file, groups, shared
        except (pa.ArrowException, OSError, ValueError) as exc:
            raise FormatError(
                chunk.shard.key,
                f"row groups {groups[0]} to {groups[-1]} cannot be decoded ({exc}); write the file again",
                offset=chunk.offset,
            ) from exc


@contextmanager
def _explained(header: ParquetHeader) -> Iterator[None]:
    """Explain nulls that the index does not know: a new index would, or the shard's own footer denies them."""
    try:
        yield
    except UntoldNullsError as exc:
        if may_hold_nulls(header.footer, header.leaves[exc.column]):
            raise
        problem = (
            f"column {exc.column!r} holds nulls, and the shard's own footer says that it has none; write the shard "
            "again, or leave the column out with columns="
        )
        raise FormatError(exc.shard, problem) from exc


def _read_groups(file: pq.ParquetFile, groups: list[int], names: list[str]) -> pa.Table:
    try:
        return file.read_row_groups(groups, columns=names, use_threads=False)
    except pa.ArrowNotImplementedError:  # dictionaries inside of lists or structs, of several row groups
        return pa.concat_tables([file.read_row_group(group, columns=names, use_threads=False) for group in groups])


def _repeating(header: ParquetHeader, groups: list[int], names: Sequence[str], source: SparseFile) -> list[str]:
    """The columns that hold text or binaries which their dictionaries, in one of the row groups, repeat."""
    return [
        name
        for name in names
        if not pt.is_dictionary(header.schema.field(name).type)
        and any(
            _repeats(header.footer.row_group(group).column(leaf), source)
            for group in groups
            for leaf in header.leaves[name]
        )
    ]


def _repeats(column: pq.ColumnChunkMetaData, source: SparseFile) -> bool:
    return column.physical_type == "BYTE_ARRAY" and repeats_values(column, _read_dictionary_header(column, source))


def _read_dictionary_header(column: pq.ColumnChunkMetaData, source: SparseFile) -> bytes:
    """The first bytes of a column, which begin with its dictionary's page; none where it has no dictionary."""
    if not column.has_dictionary_page:
        return b""
    start, stop = column_range(column)
    source.seek(start)
    return source.read(min(PAGE_HEADER_BYTES, stop - start))


def _refuse_long_dictionaries(
    header: ParquetHeader, groups: list[int], names: Sequence[str], source: SparseFile, chunk: ChunkRef
) -> None:
    """Raise FormatError where a dictionary claims more values than its page has bytes for: pyarrow makes room first."""
    for group in map(header.footer.row_group, groups):
        for leaf in (leaf for name in names for leaf in header.leaves[name]):
            facts = read_dictionary_facts(_read_dictionary_header(group.column(leaf), source))
            if facts is not None and facts[1] * value_width(header.footer.schema.column(leaf)) > max(0, facts[0]):
                size, entries = facts
                problem = f"a dictionary of {entries} values in a page of {size} bytes; fetch or write the file again"
                raise FormatError(chunk.shard.key, problem, offset=column_range(group.column(leaf))[0])


def _read_counted(
    file: pq.ParquetFile, header: ParquetHeader, groups: list[int], names: list[str], chunk: ChunkRef
) -> pa.Table:
    """The row groups as a table, opened piece by piece so that it ends where they take more than they may."""
    batches: list[pa.RecordBatch] = []
    total = 0
    for batch in _batches(file, header, groups, names, _COUNTED_ROWS):
        batches.append(batch)
        total += batch.nbytes
        refuse_large(chunk, total, at_least=True)
    return pa.Table.from_batches(batches)


def _batches(
    file: pq.ParquetFile, header: ParquetHeader, groups: list[int], names: list[str], rows: int
) -> Iterator[pa.RecordBatch]:
    """The row groups in batches of at most ``rows``."""
    # pyarrow does not go over several with a dictionary inside of a list or struct.
    one_by_one = any(_holds_dictionary(header.schema.field(name).type) for name in names)
    for some in ([group] for group in groups) if one_by_one else [groups]:
        yield from file.iter_batches(rows, row_groups=some, columns=names, use_threads=False)


def _holds_dictionary(kind: pa.DataType) -> bool:
    inside = (kind.field(i).type for i in range(kind.num_fields))
    return any(pt.is_dictionary(each) or _holds_dictionary(each) for each in inside)


def _may_be_null(field: pa.Field) -> bool:
    """Return whether a schema lets values of a field be null, or those of its lists of one length."""
    return field.nullable or (pt.is_fixed_size_list(field.type) and _may_be_null(field.type.value_field))
