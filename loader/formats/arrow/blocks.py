"""Opened chunks as blocks: columns in which a shard has no value get the type that other shards know.

A table written from values that are all missing has no type for them: Arrow's ``null``, or lists of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache, reduce
from math import prod
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.types as pt

from ...errors import FormatError
from ..schema import make_block, struct_fields
from ..shard import refuse_change, refuse_large
from .columns import describe_type, find_unread, is_file_struct, to_columns, value_bytes, with_paths

if TYPE_CHECKING:
    from ...columns import Block, Column
    from ..shard import ChunkRef

_FILES = {
    "struct<bytes: binary, path: string>": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    "struct<path: string, bytes: binary>": pa.struct({"path": pa.string(), "bytes": pa.binary()}),
}
_SIZED = re.compile(r"(.+?)((?:\[\d+(?:, \d+)*\])+)")
_ZONED = re.compile(r"timestamp\[(\w+), tz=(.+)\]")


def table_block(table: pa.Table, chunk: ChunkRef, known: Mapping[str, Any], held_bytes: int = 0) -> Block:
    """The columns of an opened chunk; ``known`` are those of the data set's schema.

    Raises:
        FormatError: the shard changed after it was indexed.
        MemoryLimitError: nulls of a type with values of one size take more than the chunk may.
    """
    refuse_change(chunk, table.num_rows)
    return _block(table, chunk, known, held_bytes)


def batch_block(batch: pa.RecordBatch, chunk: ChunkRef, known: Mapping[str, Any]) -> Block:
    """The columns of some rows of a chunk; see ``table_block``."""
    return _block(batch, chunk, known)


def _block(rows: pa.Table | pa.RecordBatch, chunk: ChunkRef, known: Mapping[str, Any], held_bytes: int = 0) -> Block:
    found: dict[str, Column] = {}
    for name, kind in zip(rows.schema.names, rows.schema.types, strict=True):
        if unread := find_unread(kind):
            raise FormatError(
                chunk.shard.key,
                f"column {name!r} holds values of {unread}, which pyarrow has no form for; leave it out with columns=, "
                "or write it as whole numbers, a duration or month_day_nano_interval",
                offset=chunk.offset,
            )
        values = typed_values(rows.column(name), known[name]["type"], chunk)
        found |= to_columns(name, values, nulls=known[name]["nulls"], shard=chunk.shard.key)
    return make_block(found, rows.num_rows, held_bytes)


def typed_table(table: pa.Table, chunk: ChunkRef, known: Mapping[str, Any]) -> pa.Table:
    """The table as it is stored, but for columns without a value in its shard."""
    for place, name in enumerate(table.schema.names):
        values = table.column(name)
        typed = typed_values(values, known[name]["type"], chunk)
        if typed is not values:
            table = table.set_column(place, name, typed)
    return table


def typed_values(values: pa.Array | pa.ChunkedArray, described: str, chunk: ChunkRef) -> pa.Array | pa.ChunkedArray:
    """Values of no type as nulls of the type that is ``described`` (by ``describe_type``); others as they are."""
    kind = typed_kind(values.type, described)
    if kind == values.type:
        return values
    if not pt.is_null(values.type):
        return values.cast(kind)
    refuse_large(chunk, len(values) * (value_bytes(kind) or 0))
    return pa.nulls(len(values), kind)


@lru_cache(256)
def typed_kind(kind: pa.DataType, described: str) -> pa.DataType:
    """The type as which values of ``kind`` are read: another one for nulls, and for lists and structs of them."""
    if pt.is_null(kind):
        return _kind_of(described)
    if pt.is_struct(kind) and is_file_struct(kind):
        return with_paths(kind)
    if pt.is_struct(kind) and described.startswith("struct<"):
        parts = struct_fields(described)
        if [part.partition(": ")[0] for part in parts] == [field.name for field in kind]:
            types = (part.partition(": ")[2] for part in parts)
            return pa.struct([of.with_type(typed_kind(of.type, part)) for of, part in zip(kind, types, strict=True)])
    if (pt.is_list(kind) or pt.is_large_list(kind)) and described.startswith("list<"):
        inner = typed_kind(kind.value_type, described[5:-1])
        if inner != kind.value_type:
            return pa.list_(inner) if pt.is_list(kind) else pa.large_list(inner)
    return kind


@lru_cache(256)
def _kind_of(described: str) -> pa.DataType:
    """A type that is described so; null for maps, decimals and the like, whose nulls are read alike."""
    if described in _FILES:
        return _FILES[described]
    try:
        if sized := _SIZED.fullmatch(described):
            *inner, last = [[int(size) for size in group.split(", ")] for group in sized[2][1:-1].split("][")]
            kind = reduce(pa.list_, map(prod, inner), _kind_of(sized[1]))
            return pa.list_(kind, last[0]) if len(last) == 1 else pa.fixed_shape_tensor(kind, last)
        if zoned := _ZONED.fullmatch(described):
            return pa.timestamp(zoned[1], zoned[2])
        if described.startswith("struct<"):
            parts = (part.partition(": ") for part in struct_fields(described))
            kind = pa.struct([(name, _kind_of(of_field)) for name, _, of_field in parts])
            return kind if describe_type(kind) == described else pa.null()
        return pa.list_(_kind_of(described[5:-1])) if described.startswith("list<") else pa.type_for_alias(described)
    except (pa.ArrowException, ValueError, OverflowError):
        return pa.null()
