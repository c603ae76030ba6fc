"""WebDataset shards: tar archives whose members ``KEY.FIELD`` stand together by key.

Which members count, and how names split into key and field, is what the webdataset library does; damage that it passes
over in silence is an error here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ....storage import ByteRange, ObjectInfo, Store
from ...columns import Block, BytesColumn, Column, IntArray
from ...errors import ConfigError, FormatError
from ..compressed import codec_of, decompress, decompressed_pieces
from ..shard import CHUNK_BYTES, ChunkRef, ChunkSpan, ShardIndex, ShardTask
from ..windows import PieceWindows, ShardWindows
from .blocks import BLOCK
from .census import refuse_duplicates, take_census
from .headers import read_members, refuse_truncation
from .names import KEY_COLUMN, RESERVED_FIELDS, NameTable, group_names

_SMALL_BYTES = 64
_ENDINGS = (".tar", ".tar.gz", ".tgz", ".tar.zst", ".tar.zstd", ".tzst")


@dataclass(frozen=True, slots=True)
class TarFormat:
    """Reads .tar, .tar.gz, .tgz and .tar.zst shards; a compressed one is one chunk.

    Columns are the fields as bytes, and ``__key__`` as text (bytes that are not UTF-8 as ``\\xNN``), which is always
    there. A field that a sample lacks is missing there (a start of -1).
    """

    chunk_bytes: int = CHUNK_BYTES
    name: str = field(default="tar", init=False)

    def __post_init__(self) -> None:
        if self.chunk_bytes < BLOCK:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: give at least {BLOCK}")

    def config(self) -> dict[str, Any]:
        return {"chunk_bytes": self.chunk_bytes}

    def shards(self, store: Store, listing: Sequence[ObjectInfo]) -> list[ShardTask]:
        return [ShardTask(info) for info in listing if info.key.lower().endswith(_ENDINGS)]

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        info = task.info
        if info.size == 0:
            raise FormatError(info.key, "the shard has no bytes; fetch or write it anew", offset=0)
        codec = codec_of(info.key)
        if codec is not None:
            with closing(decompressed_pieces(store, info, codec)) as pieces:
                census = take_census(PieceWindows(pieces), info.key)
            samples = len(census.starts)
            chunks = [ChunkSpan(0, info.size, samples, census.length)] if samples else []
        else:
            with ShardWindows(store, info) as windows:
                census = take_census(windows, info.key)
            chunks = cut_chunks(census.starts, census.stops, self.chunk_bytes)
        return ShardIndex(chunks, {"fields": sorted(census.fields)})

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        return {"fields": sorted({*known.get("fields", ()), *new.get("fields", ())})}

    def open_shard(self, store: Store, shard: ObjectInfo) -> None:
        return None

    def chunk_ranges(self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None) -> list[ByteRange]:
        return [chunk.byte_range]

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        shard, base = chunk.shard.key, chunk.offset
        fields = _chosen(columns, schema["fields"])
        run = parts[0]
        codec = codec_of(shard)
        if codec is not None:
            run = decompress(run, codec, shard)
        members = read_members(run, shard, base, whole=True)
        refuse_truncation(members, len(run), shard, base, padded=codec is not None)
        table = group_names(members.names)
        if table.samples != chunk.samples:
            raise FormatError(
                shard,
                f"the chunk holds {table.samples} samples, the manifest says {chunk.samples}: the shard changed "
                "after it was indexed; index it anew",
                offset=base,
            )
        starts = np.full((len(table.fields), table.samples), -1, np.int64)
        stops = np.full_like(starts, -1)
        at = members.starts[table.members]
        starts[table.codes, table.rows] = at
        stops[table.codes, table.rows] = at + members.sizes[table.members]
        if np.count_nonzero(starts >= 0) != len(at) or not RESERVED_FIELDS.isdisjoint(table.fields):
            refuse_duplicates(table, members, frozenset(), shard, base)
        keys = _key_column(table)
        found = {name: code for code, name in enumerate(table.fields)}
        block: dict[str, Column] = {KEY_COLUMN: keys}
        for name in fields:
            code = found.get(name)
            if code is None:
                absent = np.full(table.samples, -1, np.int64)
                block[name] = BytesColumn(run, absent, absent)
            else:
                block[name] = _field_column(run, starts[code], stops[code])
        nbytes = len(run) + len(keys.buffer) + 16 * table.samples * len(block)
        return Block(table.samples, nbytes, block)


def _chosen(columns: Sequence[str] | None, fields: Sequence[str]) -> Sequence[str]:
    if columns is None:
        return fields
    chosen = [name for name in columns if name != KEY_COLUMN]
    unknown = sorted(set(chosen) - set(fields))
    if unknown:
        raise ConfigError(f"columns={list(columns)}: the data set has no {unknown}; it has {[KEY_COLUMN, *fields]}")
    return chosen


def _field_column(run: memoryview, starts: IntArray, stops: IntArray) -> BytesColumn:
    """A field's values where they lie in the chunk; small ones side by side in a buffer of their own.

    A label of a few bytes is then not a cache miss of its own, somewhere in the megabytes of the chunk, when it is
    gathered: its block has just been read here.
    """
    sizes = stops - starts
    total = int(sizes.sum())
    if total > _SMALL_BYTES * len(sizes):
        return BytesColumn(run, starts, stops)
    ends = np.cumsum(sizes)
    packed = np.frombuffer(run, np.uint8)[np.repeat(starts - (ends - sizes), sizes) + np.arange(total)]
    return BytesColumn(memoryview(packed.tobytes()), np.where(starts >= 0, ends - sizes, -1), ends)


def _key_column(table: NameTable) -> BytesColumn:
    first = np.flatnonzero(np.diff(table.rows, prepend=-1))
    names, dots = table.names[first], table.dots[first]
    if (names > 127).any():
        keys = [
            name[:dot].tobytes().decode("utf-8", "backslashreplace").encode()
            for name, dot in zip(names, dots, strict=True)
        ]
        stops = np.cumsum([len(key) for key in keys])
        return BytesColumn(memoryview(b"".join(keys)), stops - [len(key) for key in keys], stops, text=True)
    starts = np.arange(len(names), dtype=np.int64) * names.shape[1]
    data = names.tobytes()
    return BytesColumn(memoryview(data), starts, starts + dots, text=True, ascii=data.decode("ascii"))


def cut_chunks(starts: IntArray, stops: IntArray, chunk_bytes: int) -> list[ChunkSpan]:
    """Runs of whole samples of at most ``chunk_bytes``, or of one sample that is longer.

    ``starts`` and ``stops``: (samples,) int64 byte offsets, rising.
    """
    chunks: list[ChunkSpan] = []
    first, count = 0, len(starts)
    while first < count:
        offset = int(starts[first])
        after = max(int(np.searchsorted(stops, offset + chunk_bytes, side="right")), first + 1)
        length = int(stops[after - 1]) - offset
        chunks.append(ChunkSpan(offset, length, after - first, length))
        first = after
    return chunks
