"""Shards of JSON lines: one object a line, plain (cut into chunks at line ends) or gzip or zstd (one chunk).

| values of a column, over the whole data set | column |
| --- | --- |
| integers, booleans | ArrayColumn int64, bool; with nulls (0 there) also a bool ArrayColumn ``NAME__null`` |
| numbers with a fraction among them, or beyond int64 | ArrayColumn float64; null is NaN |
| strings, lists, objects | ObjectColumn |
| of several kinds, or maps | JsonColumn: each value with the type it has |

The index reads every line, so that types and nulls are known for the data set and do not change from chunk to chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from ....storage import ByteRange, ObjectInfo, Store
from ...columns import ArrayColumn, Block, Column, IntArray, ObjectColumn
from ...errors import ConfigError, FormatError
from ..compressed import codec_of, decompress, decompressed_pieces
from ..shard import CHUNK_BYTES, ChunkRef, ChunkSpan, ShardIndex, ShardTask
from ..windows import PieceWindows, ShardWindows, Windows
from .lines import infer_columns, read_columns
from .types import JsonType, merge_types

NULL_SUFFIX = "__null"
_PLAIN = (".jsonl", ".ndjson", ".json-lines")
_ENDINGS = tuple(name + codec for name in _PLAIN for codec in ("", ".gz", ".zst", ".zstd"))
# One line must fit into memory several times over.
LINE_BYTES = 256 << 20
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonColumn(ObjectColumn):
    """Values of types that differ from row to row: kept as JSON text, parsed when they are taken."""

    def take(self, rows: IntArray) -> list[Any]:
        texts = self.values.take(pa.array(rows)).to_pylist()
        return [None if text is None else json.loads(text) for text in texts]


@dataclass(frozen=True, slots=True)
class JsonlFormat:
    """Reads .jsonl, .ndjson and .json-lines shards, also .gz and .zst ones."""

    chunk_bytes: int = CHUNK_BYTES
    name: str = field(default="jsonl", init=False)

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: give at least 1")

    def config(self) -> dict[str, Any]:
        return {"chunk_bytes": self.chunk_bytes}

    def shards(self, store: Store, listing: Sequence[ObjectInfo]) -> list[ShardTask]:
        return [ShardTask(info) for info in listing if info.key.lower().endswith(_ENDINGS)]

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        info = task.info
        if info.size == 0:
            raise FormatError(info.key, "the shard has no bytes; fetch or write it anew", offset=0)
        codec = codec_of(info.key)
        if codec is None:
            with ShardWindows(store, info) as windows:
                chunks, schema, _ = self._index(windows, info.key)
            return ShardIndex(chunks, schema)
        with closing(decompressed_pieces(store, info, codec)) as pieces:
            chunks, schema, length = self._index(PieceWindows(pieces), info.key)
        samples = sum(chunk.samples for chunk in chunks)
        return ShardIndex([ChunkSpan(0, info.size, samples, length)] if samples else [], schema)

    def _index(self, windows: Windows, shard: str) -> tuple[list[ChunkSpan], dict[str, Any], int]:
        chunks: list[ChunkSpan] = []
        schema: dict[str, Any] | None = None
        offset = len(_BYTE_ORDER_MARK) if bytes(windows.read(0, 3)[:3]) == _BYTE_ORDER_MARK else 0
        while len(run := _whole_lines(windows, offset, self.chunk_bytes, shard)):
            mixed = schema is not None and any(column["type"] == "any" for column in schema["columns"].values())
            samples, types, nulls = infer_columns(run, shard, offset, mixed=mixed)
            if samples:
                chunks.append(ChunkSpan(offset, len(run), samples, len(run)))
                found = {"columns": {name: {"type": kind, "nulls": name in nulls} for name, kind in types.items()}}
                schema = found if schema is None else merge_columns(schema, found)
            offset += len(run)
        if schema is None:
            # A shard without samples says nothing on columns, not even that they are missing.
            return [], {}, offset
        _refuse_clash(schema, shard)
        return chunks, schema, offset

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        if not known or not new:
            return known or new
        merged = merge_columns(known, new)
        _refuse_clash(merged, shard)
        return merged

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
        known: Mapping[str, Any] = schema["columns"]
        chosen = list(known) if columns is None else _chosen(columns, known)
        shard, run, base = chunk.shard.key, parts[0], chunk.offset
        codec = codec_of(shard)
        if codec is not None:
            run = decompress(run, codec, shard)
        if base == 0 and bytes(run[:3]) == _BYTE_ORDER_MARK:
            run, base = run[3:], 3
        samples, arrays = read_columns(run, {name: known[name]["type"] for name in chosen}, shard, base)
        if samples != chunk.samples:
            raise FormatError(
                shard,
                f"the chunk holds {samples} lines, the manifest says {chunk.samples}: the shard changed after it was "
                "indexed; index it anew",
                offset=base,
            )
        block: dict[str, Column] = {}
        for name, array in arrays.items():
            if array.null_count and not known[name]["nulls"]:
                raise FormatError(
                    shard,
                    f"column '{name}' has nulls, the index says that it has none: the shard changed after it was "
                    "indexed; index it anew",
                    offset=base,
                )
            block |= _columns(name, array, known[name]["type"], nulls=known[name]["nulls"])
        nbytes = sum(column.nbytes for column in block.values() if isinstance(column, (ArrayColumn, ObjectColumn)))
        return Block(samples, nbytes, block)


def merge_columns(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of both; one that a side lacks has nulls."""
    absent = {"type": "null", "nulls": True}
    names = [*one["columns"], *(name for name in two["columns"] if name not in one["columns"])]
    pairs = {name: (one["columns"].get(name, absent), two["columns"].get(name, absent)) for name in names}
    return {
        "columns": {
            name: {"type": merge_types(a["type"], b["type"]), "nulls": a["nulls"] or b["nulls"]}
            for name, (a, b) in pairs.items()
        }
    }


def _refuse_clash(schema: Mapping[str, Any], shard: str) -> None:
    columns = schema["columns"]
    for name, column in columns.items():
        if column["nulls"] and column["type"] in ("int", "bool") and name + NULL_SUFFIX in columns:
            raise FormatError(
                shard, f"column '{name}{NULL_SUFFIX}' has the name kept for the nulls of '{name}'; rename it"
            )


def _chosen(columns: Sequence[str], known: Mapping[str, Any]) -> list[str]:
    unknown = sorted(set(columns) - set(known))
    if unknown:
        raise ConfigError(f"columns={list(columns)}: the data set has no {unknown}; it has {list(known)}")
    return list(dict.fromkeys(columns))


def _columns(name: str, array: pa.Array, kind: JsonType, *, nulls: bool) -> dict[str, Column]:
    if kind == "any":
        return {name: JsonColumn(array)}
    if kind == "float":
        return {name: ArrayColumn(array.to_numpy(zero_copy_only=False))}
    if kind not in ("int", "bool"):
        return {name: ObjectColumn(array)}
    if not nulls:
        return {name: ArrayColumn(array.to_numpy(zero_copy_only=False))}
    zero = pa.scalar(0 if kind == "int" else False, array.type)
    return {
        name: ArrayColumn(pc.fill_null(array, zero).to_numpy(zero_copy_only=False)),
        name + NULL_SUFFIX: ArrayColumn(np.asarray(array.is_null().to_numpy(zero_copy_only=False))),
    }


def _whole_lines(windows: Windows, offset: int, chunk_bytes: int, shard: str) -> memoryview:
    """Whole lines of at most ``chunk_bytes`` from ``offset`` on, or one longer line; nothing at the end."""
    at_least = chunk_bytes
    while True:
        window = windows.read(offset, at_least)
        if len(window) < at_least:
            return window
        feed = bytes(window[:at_least]).rfind(b"\n")
        if feed >= 0:
            return window[: feed + 1]
        if at_least >= LINE_BYTES:
            raise FormatError(
                shard, f"a line of more than {LINE_BYTES} bytes: no JSON lines; check the file", offset=offset
            )
        at_least = min(2 * at_least, LINE_BYTES)
