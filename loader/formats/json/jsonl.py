"""Shards of JSON lines: one object a line, plain (cut at line ends) or gzip, bzip2 or zstd (one chunk).

| values of a column, over the whole data set | column |
| --- | --- |
| integers, booleans | ArrayColumn int64, uint64, bool; with nulls (0 there) also a bool ArrayColumn ``NAME__null`` |
| numbers with a fraction among them, or beyond int64, all of which float64 holds | ArrayColumn float64; null is NaN |
| strings, lists, objects | ObjectColumn |
| of several kinds, or maps, or other numbers | JsonColumn: each value with the type it has |

The index reads every line, so that types and nulls are known for the data set and do not change from chunk to chunk.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pyarrow as pa

from ...arrow_arrays import find_nulls, view_numbers, wrap_numbers
from ...columns import ArrayColumn, Block, Column, IntArray, ObjectColumn
from ...errors import FormatError
from ..compressed import codec_of, decompress, decompressed_pieces, hidden_codec
from ..schema import NULL_SUFFIX, choose_columns, make_block, refuse_null_clash
from ..shard import (
    CHUNK_BYTES,
    CODEC_SUFFIXES,
    SUFFIXES,
    BaseFormat,
    ChunkRef,
    ChunkSpan,
    ShardIndex,
    ShardTask,
    refuse_change,
    refuse_empty,
    whole_part,
)
from ..windows import PieceWindows, ShardWindows, Windows
from .lines import find_lines, infer_columns, read_columns
from .types import JsonType, make_column, union_columns

if TYPE_CHECKING:
    from ....storage import Store

# One line must fit into memory several times over.
LINE_BYTES = 256 << 20
# Types whose nulls need a mark.
_MARKED = ("int", "uint", "bool")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class JsonColumn(ObjectColumn):
    """Values whose types differ from row to row: kept as JSON text, parsed when they are taken."""

    def take(self, rows: IntArray) -> list[Any]:
        texts = self.values.take(wrap_numbers(rows)).to_pylist()
        return [None if text is None else json.loads(text) for text in texts]


@dataclass(frozen=True, slots=True)
class JsonlFormat(BaseFormat):
    """Reads .jsonl, .ndjson and .json-lines shards, plain or compressed with gzip, bzip2 or zstd.

    The index reads every line, so that a column has one type over the whole data set:

    - integers: int64, or uint64 where some are beyond int64 and none is negative; null, or no such key, is 0, and
      marked in ``NAME__null``; booleans likewise
    - numbers, some with a fraction or beyond int64, all exact in float64: float64; null is NaN
    - strings, lists, objects: Python values; objects have all keys that any of the column has, None where they lack
      one, and one type per key for numbers
    - several kinds; empty objects, or objects of more than 256 keys; integers that neither uint64 nor float64 holds,
      also deep inside: Python values as they are; a tensor where a batch has only numbers that one type holds

    No integer loses a bit: float64 holds those up to 2^53, and those that it gives back digit by digit. ``NaN`` and
    ``Infinity`` by name are accepted. Refused, with a ``FormatError``: lines that are not one UTF-8 JSON object or
    exceed 256 MiB, objects with a key twice or nested more than 100 deep, numbers beyond float64, unpaired surrogates,
    and more than 4096 different keys.
    """

    name: ClassVar[str] = "jsonl"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["jsonl"]
    # As Spark and datasets name lines, and everybody else a single value.
    other_suffixes: ClassVar[tuple[str, ...]] = tuple(".json" + codec for codec in ("", *CODEC_SUFFIXES))

    chunk_bytes: int = CHUNK_BYTES

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        info = task.info
        refuse_empty(info)
        codec = codec_of(info.key)
        if codec is None:
            with ShardWindows(store, info) as windows:
                if problem := hidden_codec(bytes(windows.read(0)[:4])):
                    raise FormatError(info.key, problem, offset=0)
                chunks, schema, _ = self._index(windows, info.key)
            return ShardIndex(chunks, schema)
        with closing(decompressed_pieces(store, info, codec)) as pieces:
            chunks, schema, length = self._index(PieceWindows(pieces), info.key)
        samples = sum(chunk.samples for chunk in chunks)
        return ShardIndex([ChunkSpan(0, info.size, samples, length)] if samples else [], schema)

    def _index(self, windows: Windows, shard: str) -> tuple[list[ChunkSpan], dict[str, Any], int]:
        chunks: list[ChunkSpan] = []
        known: dict[str, Any] = {}
        feeds = 0
        offset = len(_BYTE_ORDER_MARK) if bytes(windows.read(0, 3)[:3]) == _BYTE_ORDER_MARK else 0
        while len(run := _whole_lines(windows, offset, self.chunk_bytes, shard)):
            lines = find_lines(run, shard, offset, feeds)
            types, nulls = infer_columns(lines, mixed=any(column["type"] == "any" for column in known.values()))
            if len(lines):
                found = {name: make_column(kind, nulls=name in nulls) for name, kind in types.items()}
                known = union_columns(known, found) if chunks else found
                chunks.append(ChunkSpan(offset, len(run), len(lines), len(run)))
            offset += len(run)
            feeds += int(np.count_nonzero(np.frombuffer(run, np.uint8) == 10))
        # A shard without samples says nothing about columns, not even that they are missing.
        return chunks, _schema(known, shard) if chunks else {}, offset

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        if not known or not new:
            return known or new
        return _schema(union_columns(known["columns"], new["columns"]), shard)

    def opened_bytes(
        self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None, schema: Mapping[str, Any]
    ) -> int:
        # Each column has a value in each row, whether the line has its key or not.
        return chunk.memory + 8 * chunk.samples * len(choose_columns(schema["columns"], columns))

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        known: Mapping[str, Any] = schema["columns"]
        chosen = choose_columns(known, columns)
        shard, run, base = chunk.shard.key, whole_part(chunk, parts), chunk.offset
        codec = codec_of(shard)
        if codec is not None:
            run = decompress(run, codec, chunk)
        if base == 0 and bytes(run[:3]) == _BYTE_ORDER_MARK:
            run, base = run[3:], 3
        lines = find_lines(run, shard, base)
        arrays = read_columns(lines, {name: known[name]["type"] for name in chosen})
        refuse_change(chunk, len(lines))
        block: dict[str, Column] = {}
        for name, array in arrays.items():
            if array.null_count and not known[name]["nulls"]:
                raise FormatError(
                    shard,
                    f"column {name!r} holds nulls, but the index says that it has none: the shard changed after it was "
                    "indexed; index it again",
                    offset=base,
                )
            block |= _columns(name, array, known[name]["type"], nulls=known[name]["nulls"])
        return make_block(block, chunk.samples)


def _schema(columns: dict[str, Any], shard: str) -> dict[str, Any]:
    marked = (name for name, column in columns.items() if column["nulls"] and column["type"] in _MARKED)
    refuse_null_clash(columns, marked, shard)
    return {"columns": columns}


def _columns(name: str, array: pa.Array, kind: JsonType, *, nulls: bool) -> dict[str, Column]:
    if kind == "any":
        return {name: JsonColumn(array)}
    if kind == "float":
        numbers = view_numbers(array)
        return {name: ArrayColumn(np.where(find_nulls(array), np.nan, numbers) if array.null_count else numbers)}
    if kind not in _MARKED:
        return {name: ObjectColumn(array)}
    if not nulls:
        return {name: ArrayColumn(view_numbers(array))}
    missing = find_nulls(array)
    numbers = view_numbers(array)
    return {
        name: ArrayColumn(np.where(missing, np.zeros(1, numbers.dtype), numbers)),
        name + NULL_SUFFIX: ArrayColumn(missing),
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
                shard,
                f"a line of more than {LINE_BYTES} bytes, so these are not JSON lines; check the file",
                offset=offset,
            )
        at_least = min(2 * at_least, LINE_BYTES)
