"""Arrow IPC files and streams: a chunk is a record batch, or a run of small ones."""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.types as pt

from ...columns import Block
from ...errors import FormatError
from ..schema import columns_here
from ..shard import (
    CHUNK_BYTES,
    SUFFIXES,
    BaseFormat,
    ChunkRef,
    ChunkSpan,
    ShardIndex,
    ShardTask,
    join_spans,
    refuse_change,
    refuse_large,
    whole_part,
)
from .blocks import table_block, typed_kind, typed_table
from .columns import has_offsets, marks_nulls, offsets_rise, schema_columns, value_bytes
from .ipc_reader import IpcReader
from .messages import (
    PREFIX_BYTES,
    RECORDS,
    Message,
    MessageBlock,
    body_bytes,
    holds_compressed,
    is_big_endian,
    metadata_length,
    parse_message,
)

if TYPE_CHECKING:
    from ....storage import ObjectInfo, Store


# Arrow's columnar format, "Variable-size Binary View Layout": longer values lie in a buffer of their own.
_INLINE_BYTES = 12
_VIEW = np.dtype([("length", "<i4"), ("prefix", "<i4"), ("buffer", "<i4"), ("offset", "<i4")])


def views_are_inside(array: pa.Array) -> bool:
    """Return whether all views of an array, also those of nulls and of arrays inside it, stay inside their buffers."""
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return views_are_inside(array.storage)
    if pt.is_string_view(kind) or pt.is_binary_view(kind):
        return _are_inside(array)
    if pt.is_struct(kind):
        return all(views_are_inside(array.field(i)) for i in range(kind.num_fields))
    if pt.is_map(kind):
        return views_are_inside(array.keys) and views_are_inside(array.items)
    if pt.is_dictionary(kind):
        return views_are_inside(array.dictionary)
    return views_are_inside(array.values) if kind.num_fields == 1 and not pt.is_union(kind) else True


def _are_inside(array: pa.Array) -> bool:
    _, data, *buffers = array.buffers()
    if data is None or not len(array):
        return True
    views = np.frombuffer(data, _VIEW, count=len(array), offset=array.offset * _VIEW.itemsize)
    lengths = views["length"].astype(np.int64)
    if (lengths < 0).any():
        return False
    long = lengths > _INLINE_BYTES
    places, offsets, lengths = views["buffer"][long], views["offset"][long].astype(np.int64), lengths[long]
    if not len(places):
        return True
    if int(places.min()) < 0 or int(places.max()) >= len(buffers) or int(offsets.min()) < 0:
        return False
    sizes = np.array([buffer.size for buffer in buffers], np.int64)
    return bool((offsets + lengths <= sizes[places]).all())


_STATE = "state.json"
# Beside the data of `save_to_disk`, and in the library's own cache, where no state says which files are the data.
_INFO = "dataset_info.json"


def pick_saved(
    store: Store, listing: Sequence[ObjectInfo], tasks: Sequence[ShardTask], named: Collection[str]
) -> list[ShardTask]:
    """Of such folders the files that their states list, in that order, and those that are ``named``; of others all.

    Beside the data may lie results of ``map``, in the cache of datasets, too, and files of an earlier save in another
    number of shards.

    Raises:
        FormatError: a file that a state lists is missing.
    """
    states = {info.key.removesuffix(_STATE): info for info in listing if info.key.rpartition("/")[2] == _STATE}
    known = {info.key.rpartition("/")[0] for info in listing if info.key.rpartition("/")[2] in (_STATE, _INFO)}
    listed = {folder: _list_files(store, info, folder) for folder, info in states.items()}
    there = {task.info.key for task in tasks}
    for folder, keys in listed.items():
        missing = next((key for key in keys or () if key not in there), None)
        if missing is not None:
            raise FormatError(states[folder].key, f"lists {missing}, which is not there; copy it, or save it again")
    places = {key: place for keys in listed.values() for place, key in enumerate(keys or ())}

    def is_data(key: str) -> bool:
        folder, slash, name = key.rpartition("/")
        keys = listed.get(folder + slash)
        return key in places if keys else folder not in known or not name.startswith("cache-")

    picked = [task for task in tasks if task.info.key in named or is_data(task.info.key)]
    for keys in listed.values():
        slots = [slot for slot, task in enumerate(picked) if task.info.key in set(keys or ())]
        in_order = sorted((picked[slot] for slot in slots), key=lambda task: places[task.info.key])
        for slot, task in zip(slots, in_order, strict=True):
            picked[slot] = task
    return picked


def _list_files(store: Store, info: ObjectInfo, folder: str) -> list[str] | None:
    """The keys that a state lists; None where it is another program's, or lists none."""
    try:
        files = json.loads(bytes(store.get(info.key, etag=info.etag)))["_data_files"]
        return [f"{folder}{file['filename']}" for file in files] or None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


# What a compressed body grows to is not in the metadata; a guess for the estimate of memory.
_COMPRESSION_RATIO = 3


@dataclass(frozen=True, slots=True)
class ArrowHeader:
    """A shard's schema, and the messages of the schema and the dictionaries: what a stream starts with.

    ``is_swapped``: the bytes of values are in another order than this machine's.
    """

    schema: pa.Schema
    prefix: bytes
    has_dictionaries: bool
    is_swapped: bool

    @property
    def nbytes(self) -> int:
        """An estimate: the messages, and pyarrow's objects for the schema."""
        return len(self.prefix) + 1000 + 500 * len(self.schema)


@dataclass(frozen=True, slots=True)
class ArrowFormat(BaseFormat):
    """Reads Arrow IPC files (.arrow, .feather of version 2) and streams (.arrows; Hugging Face's .arrow), told apart by
    their first bytes; bodies may be compressed with lz4 or zstd.

    Consecutive record batches are one chunk up to ``chunk_bytes``. A chunk is read whole, whatever its columns; columns
    that are not wanted are not decompressed. Dictionaries may grow by deltas but not be replaced within a shard.
    """

    name: ClassVar[str] = "arrow"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["arrow"]
    may_lack_columns: ClassVar[bool] = True

    chunk_bytes: int = CHUNK_BYTES

    def shards(self, store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> list[ShardTask]:
        """All Arrow files; of folders that ``save_to_disk`` of datasets wrote, those that are its data."""
        return pick_saved(store, listing, BaseFormat.shards(self, store, listing, named), named)

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        shard = task.info
        reader = IpcReader(store, shard)
        schema = reader.read_schema()
        # A field is one node of a batch's metadata, and each of its children another, in depth-first order.
        stops, count = [], 0
        for field in schema:
            count += _count_nodes(field.type)
            stops.append(count)
        widths = sum(value_bytes(field.type) or 0 for field in schema)
        nullable: set[str] = set()
        batches: list[ChunkSpan] = []
        for block, message in reader.messages():
            if message.kind != RECORDS:
                continue
            _check_nodes(block, message, [0, *stops], shard.key)
            if message.rows == 0:
                continue
            for field, start, stop in zip(schema, [0, *stops], stops, strict=False):
                if any(message.null_counts[start:stop]):
                    nullable.add(field.name)
            memory = max(block.body_bytes * (_COMPRESSION_RATIO if message.compressed else 1), widths * message.rows)
            batches.append(ChunkSpan(block.offset, block.stop - block.offset, message.rows, memory))
        chunks = join_spans(batches, self.chunk_bytes)
        nullable |= {
            field.name
            for field in schema
            if field.nullable and (not marks_nulls(field.type) or pt.is_dictionary(field.type))
        }
        return ShardIndex(chunks, {"columns": schema_columns(schema, nullable, shard.key), "seen_in": shard.key})

    def open_shard(self, store: Store, shard: ObjectInfo) -> ArrowHeader:
        reader = IpcReader(store, shard)
        schema = reader.read_schema()
        dictionaries = reader.read_dictionaries() if reader.dictionaries else []
        prefix = b"".join([reader.schema_message, *dictionaries])
        is_swapped = is_big_endian(reader.schema_message) != (sys.byteorder == "big")
        return ArrowHeader(schema, prefix, has_dictionaries=reader.dictionaries > 0, is_swapped=is_swapped)

    def opened_bytes(
        self, chunk: ChunkRef, header: ArrowHeader, columns: Sequence[str] | None, schema: Mapping[str, Any]
    ) -> int:
        known = schema["columns"]
        names = columns_here(known, columns, header.schema.names)
        untyped = [name for name in names if pt.is_null(header.schema.field(name).type)]
        widths = (value_bytes(typed_kind(pa.null(), known[name]["type"])) or 0 for name in untyped)
        return chunk.memory + chunk.samples * sum(widths)

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: ArrowHeader,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        known = schema["columns"]
        names = columns_here(known, columns, header.schema.names)
        if not names:
            return Block(chunk.samples, 0, {})
        data = whole_part(chunk, parts)
        table = self._read(chunk, header, data, names)
        return table_block(table.select(names), chunk, known, held_bytes=data.nbytes)

    def read_table(
        self, chunk: ChunkRef, header: ArrowHeader, parts: Sequence[memoryview], schema: Mapping[str, Any]
    ) -> pa.Table:
        """All columns of a chunk as they are stored. Raises FormatError as ``open_chunk`` does."""
        table = self._read(
            chunk, header, whole_part(chunk, parts), columns_here(schema["columns"], None, header.schema.names)
        )
        refuse_change(chunk, table.num_rows)
        return typed_table(table, chunk, schema["columns"])

    def _read(self, chunk: ChunkRef, header: ArrowHeader, data: memoryview, names: list[str]) -> pa.Table:
        try:
            pieces = [memoryview(header.prefix), data] if header.has_dictionaries else [data]
            is_compressed = any(holds_compressed(metadata) for piece in pieces for metadata, _ in _messages(piece))
            if is_compressed:
                refuse_large(chunk, sum(_opened_bytes(piece) for piece in pieces))
            if header.has_dictionaries or header.is_swapped or is_compressed:
                batches = _read_stream(header, data, names)
            else:
                batches = _read_in_place(header, data, names)
            table = pa.Table.from_batches(batches)
            _validate(table)
        except pa.ArrowNotImplementedError as exc:
            problem = f"its record batches are not read by this pyarrow ({exc}); write the file in another way"
            raise FormatError(chunk.shard.key, problem, offset=chunk.offset) from exc
        except (pa.ArrowException, OSError, ValueError, KeyError) as exc:
            problem = f"its record batches cannot be read ({exc}); write the file again"
            raise FormatError(chunk.shard.key, problem, offset=chunk.offset) from exc
        return table


def _messages(data: memoryview) -> Iterator[tuple[memoryview, memoryview]]:
    """The metadata and the body of each message in ``data``."""
    at = 0
    while at < len(data):
        start = at + PREFIX_BYTES
        body = start + metadata_length(data[at:start])
        metadata = data[start:body]
        at = body + body_bytes(metadata)
        yield metadata, data[body:at]


def _opened_bytes(data: memoryview) -> int:
    """Bytes of the messages in ``data`` once decompressed, by their headers. Raises ValueError if that cannot be."""
    return sum(parse_message(metadata).opened_bytes(body) for metadata, body in _messages(data))


def _read_in_place(header: ArrowHeader, data: memoryview, names: list[str]) -> list[pa.RecordBatch]:
    """Batches that are views of ``data``."""
    messages = pa.ipc.MessageReader.open_stream(pa.py_buffer(data))
    return [pa.ipc.read_record_batch(message, header.schema).select(names) for message in messages]


def _read_stream(header: ArrowHeader, data: memoryview, names: list[str]) -> list[pa.RecordBatch]:
    """Batches with dictionaries, compressed bodies or bytes in another order; pyarrow needs them in one piece, so that
    ``data`` is copied."""
    fields = [header.schema.get_field_index(name) for name in names]
    options = pa.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
    with pa.ipc.open_stream(pa.py_buffer(b"".join([header.prefix, data])), options=options) as stream:
        return list(stream)


def _validate(table: pa.Table) -> None:
    """pyarrow trusts the offsets and indices in a file, and would follow damaged ones out of the buffers.

    Numbers have none. Those of strings are only used to slice, so that they must rise between the first and the last;
    validating them in full would read all text.
    """
    table.validate()
    for name, column in zip(table.column_names, table.columns, strict=True):
        kind = column.type
        if has_offsets(kind):
            if not all(offsets_rise(chunk) for chunk in column.chunks):
                raise ValueError(f"the offsets of column {name!r} fall")
        elif kind.num_fields or not (pt.is_primitive(kind) or pt.is_fixed_size_binary(kind)):
            column.validate(full=True)
            if not all(views_are_inside(chunk) for chunk in column.chunks):
                raise ValueError(f"a view of a null in column {name!r} points outside of its buffers")


def _check_nodes(block: MessageBlock, message: Message, firsts: Sequence[int], shard: str) -> None:
    """Raise FormatError unless a batch has the nodes of the schema, and each column as many rows as the batch.

    ``firsts``: the index of each column's first node, then the number of nodes.
    """
    problem = ""
    if len(message.lengths) != firsts[-1]:
        problem = f"a record batch has {len(message.lengths)} nodes, but the schema {firsts[-1]}"
    elif any(message.lengths[first] != message.rows for first in firsts[:-1]):
        problem = f"a record batch of {message.rows} rows has a column of another length"
    if problem:
        raise FormatError(shard, f"{problem}; write the file again", offset=block.offset)


def _count_nodes(kind: pa.DataType) -> int:
    if isinstance(kind, pa.BaseExtensionType):
        return _count_nodes(kind.storage_type)
    if pt.is_dictionary(kind):
        return 1
    return 1 + sum(_count_nodes(kind.field(i).type) for i in range(kind.num_fields))
