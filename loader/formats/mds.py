"""MDS, the format of mosaicml-streaming: shards named by ``index.json``, raw or compressed as a whole.

A shard is u32 samples, u32 offsets (samples + 1, from the shard's start), a JSON configuration, and the samples: a u32
size for each column without a fixed one, then the columns' bytes.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ...storage import ByteRange, ObjectInfo, Store
from ..errors import DatasetError, FormatError
from .compressed import codec_of, decompress
from .mds_encodings import fixed_size, gather, make_column
from .schema import choose_columns, make_block
from .shard import (
    CHUNK_BYTES,
    SUFFIXES,
    BaseFormat,
    ChunkRef,
    ChunkSpan,
    ShardIndex,
    ShardTask,
    cut_samples,
    find_shards,
    is_hidden,
    whole_part,
)

if TYPE_CHECKING:
    from ..columns import Block, Column, IntArray

_INDEX_NAME = "index.json"
_SUFFIX = ".mds"
_COMPRESSIONS = ("zstd", "zst", "gz", "bz2", "br", "snappy")
_U32 = np.dtype("<u4")
# More than bz2, the densest of the codecs, makes of zeros.
_MOST_RATIO = 1 << 22


@dataclass(frozen=True, slots=True)
class MdsEntry:
    """Entry of a shard in ``index.json``; ``encodings`` by column, in the order of the file."""

    samples: int
    raw_bytes: int
    encodings: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MdsFormat(BaseFormat):
    """Reads MDS data sets: every ``index.json`` below the root, whose shards come in its order.

    Raw shards are cut into chunks of about ``chunk_bytes``; a shard compressed with zstd, gz, bz2, brotli or snappy is
    one chunk, and is preferred where a shard exists in both forms. Columns encoded as 'pkl' are never read. The hashes
    in the index are not checked, because they cover whole shards.

    In a batch, by encoding:

    - numbers: a tensor of their type; uint16 and uint32 become int64, unless ``decode=None``; str_int is int64,
      str_float float64
    - ndarray: a tensor where shapes and types of a batch agree, else a list of tensors, of their own type
    - str: a list of str
    - json, str_decimal: Python values; a tensor where all are numbers (no ``Decimal``)
    - jpeg, png: images
    - bytes: a list of bytes, or decoded by the column's name or first value
    - pil, jpeg_array, list[...]: a list of bytes, as stored
    """

    name: ClassVar[str] = "mds"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["mds"]

    chunk_bytes: int = CHUNK_BYTES

    def shards(self, store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> list[ShardTask]:
        """The shards of all indexes, those of outer folders first; a shard that two indexes name is taken once."""
        objects = {info.key: info for info in listing}
        named_folders = {PurePosixPath(key).parent for key in named}
        indexes = [
            key
            for key in objects
            if PurePosixPath(key).name == _INDEX_NAME
            and (not is_hidden(key) or PurePosixPath(key).parent in named_folders)
        ]
        shards = find_shards(listing, self.suffixes, named)
        if shards and not indexes:
            raise DatasetError(
                f"{store.url}: holds MDS shards ({shards[0].key}, ...) but no {_INDEX_NAME}; copy that, too"
            )
        tasks: dict[str, ShardTask] = {}
        for key in sorted(indexes, key=lambda key: (key.count("/"), key)):
            for entry in _read_index(store, objects[key]):
                task = _task(key, entry, objects)
                tasks.setdefault(task.info.key, task)
        return list(tasks.values())

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        shard, entry = task.info, task.hint
        columns = {name: {"type": encoding, "nulls": False} for name, encoding in entry.encodings.items()}
        schema = {"columns": columns, "seen_in": shard.key}
        if entry.samples == 0:
            return ShardIndex([], schema)
        _check_count(entry, shard)
        if _compression(shard.key) or shard.size <= self.chunk_bytes:
            return ShardIndex([ChunkSpan(0, shard.size, entry.samples, entry.raw_bytes)], schema)
        head = store.get(shard.key, ByteRange(0, min(shard.size, 4 * (entry.samples + 2))), etag=shard.etag)
        offsets = _read_offsets(head, entry.samples, shard.key)
        if offsets[-1] != shard.size:
            problem = f"has {shard.size} bytes, but its samples end at {offsets[-1]}; write it again"
            raise FormatError(shard.key, problem, offset=4 * (entry.samples + 1))
        return ShardIndex(cut_samples(offsets[:-1], offsets[1:], self.chunk_bytes), schema)

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        merged = BaseFormat.merge_schema(self, known, new, shard)
        if list(known["columns"]) != list(new["columns"]):
            first = known.get("seen_in")
            raise FormatError(shard, f"has its columns in another order than {first}; write both with the same writer")
        return merged

    def chunk_ranges(self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None) -> list[ByteRange]:
        """For a part of a shard, its slice of the offsets and its samples; else the whole shard."""
        if chunk.offset == 0:
            return [chunk.byte_range]
        table = ByteRange(4 + 4 * chunk.first_row, 8 + 4 * (chunk.first_row + chunk.samples))
        if table.stop > chunk.offset:
            problem = f"has no room for the offsets of {chunk.first_row + chunk.samples} samples; index it again"
            raise FormatError(chunk.shard.key, problem, offset=chunk.offset)
        return [table, chunk.byte_range]

    def chunk_parts(self, chunk: ChunkRef, header: Any) -> list[ByteRange]:
        return self.chunk_ranges(chunk, header, None)[:-1]

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        encodings = {name: column["type"] for name, column in schema["columns"].items()}
        names = choose_columns(encodings, columns)
        shard = chunk.shard.key
        if chunk.offset == 0:
            data = _decompress(whole_part(chunk, parts), chunk)
            offsets = _read_offsets(data, chunk.samples, shard)
        else:
            data = whole_part(chunk, parts)
            offsets = np.frombuffer(parts[0], _U32).astype(np.int64) - chunk.offset
        _check_offsets(offsets, len(data), chunk)
        starts, stops = _column_slices(data, offsets, encodings, chunk)
        found: dict[str, Column] = {}
        for index, name in enumerate(encodings):
            if name in names:
                found[name] = make_column(name, encodings[name], data, starts[index], stops[index], shard)
        return make_block({name: found[name] for name in names}, chunk.samples)


def _check_count(entry: MdsEntry, shard: ObjectInfo) -> None:
    """Raise FormatError if the samples do not fit into the bytes that the index states."""
    least = sum(fixed_size(encoding) or _U32.itemsize for encoding in entry.encodings.values())
    needed = _U32.itemsize * (entry.samples + 2) + entry.samples * least
    is_raw = codec_of(shard.key) is None
    raw = shard.size if is_raw else entry.raw_bytes
    if entry.samples < 0 or needed > raw or raw > _MOST_RATIO * shard.size:
        problem = f"has {shard.size} bytes ({raw} uncompressed), but is said to hold {entry.samples} samples"
        raise FormatError(shard.key, f"{problem} of {least} bytes or more in {_INDEX_NAME}; copy both again", offset=0)


def _read_index(store: Store, info: ObjectInfo) -> list[dict[str, Any]]:
    try:
        index = json.loads(bytes(store.get(info.key, etag=info.etag)))
        version, shards = index["version"], index["shards"]
    except (ValueError, KeyError, TypeError, RecursionError) as exc:
        raise FormatError(info.key, f"is not an MDS index ({exc!r}): that has a version and shards") from exc
    if version != 2 or not isinstance(shards, list):
        raise FormatError(info.key, f"is an MDS index of version {version!r}; only version 2 is supported")
    return shards


def _task(index_key: str, entry: Mapping[str, Any], objects: Mapping[str, ObjectInfo]) -> ShardTask:
    """One shard of an index: its compressed object if that exists and can be read, else its raw one."""
    folder = PurePosixPath(index_key).parent
    try:
        if entry["format"] != "mds":
            raise FormatError(index_key, f"names a shard of the format {entry['format']!r}; only 'mds' is supported")
        raw, packed = entry["raw_data"], entry["zip_data"]
        forms = {str(folder / form["basename"]): int(form["bytes"]) for form in (packed, raw) if form}
        names, encodings, sizes = entry["column_names"], entry["column_encodings"], entry["column_sizes"]
        hint = MdsEntry(int(entry["samples"]), int(raw["bytes"]), dict(zip(names, encodings, strict=True)))
        expected = [fixed_size(encoding) for encoding in encodings]
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as exc:
        raise FormatError(index_key, f"its entry for a shard is damaged ({exc!r}); write the index again") from exc
    if expected != [size or None for size in sizes]:
        raise FormatError(index_key, f"says that {names} take {sizes} bytes, but {encodings} take {expected}")
    found = [key for key in forms if key in objects]
    if not found:
        raise FormatError(index_key, f"names {' or '.join(forms)}, but there is no such object; copy it, too")
    key = next((key for key in found if _compression(key) in ("", *_COMPRESSIONS)), None)
    if key is None:
        raise FormatError(
            found[0],
            f"is compressed as {_compression(found[0])!r}; write it with {', '.join(_COMPRESSIONS)}, or not at all",
        )
    if objects[key].size != forms[key]:
        raise FormatError(key, f"has {objects[key].size} bytes, but {forms[key]} in {index_key}; copy it again")
    return ShardTask(objects[key], hint)


def _compression(key: str) -> str:
    suffix = PurePosixPath(key).suffix.lower()
    return "" if suffix == _SUFFIX else suffix[1:]


def _decompress(data: memoryview, chunk: ChunkRef) -> memoryview:
    codec = codec_of(chunk.shard.key)
    return data if codec is None else decompress(data, codec, chunk)


def _read_offsets(data: memoryview, samples: int, shard: str) -> IntArray:
    """(samples + 1,) int64 offsets from the shard's start, out of its first bytes."""
    if len(data) < 4 * (samples + 2):
        raise FormatError(shard, f"{len(data)} bytes are too few for the offsets of {samples} samples", offset=0)
    head = np.frombuffer(data, _U32, count=samples + 2).astype(np.int64)
    if head[0] != samples:
        raise FormatError(shard, f"holds {head[0]} samples, but {samples} in {_INDEX_NAME}; copy both again", offset=0)
    offsets: IntArray = head[1:]
    if offsets[0] < 4 * (samples + 2) or (np.diff(offsets) < 0).any():
        raise FormatError(shard, "its offsets do not rise from the end of their table; write it again", offset=4)
    return offsets


def _check_offsets(offsets: IntArray, size: int, chunk: ChunkRef) -> None:
    fits = len(offsets) == chunk.samples + 1 and offsets[0] >= 0 and offsets[-1] == size
    if not fits or (np.diff(offsets) < 0).any():
        problem = f"its offsets do not fit {chunk.samples} samples in {size} bytes; write it again"
        raise FormatError(chunk.shard.key, problem, offset=chunk.offset)


def _column_slices(
    data: memoryview, offsets: IntArray, encodings: Mapping[str, str], chunk: ChunkRef
) -> tuple[IntArray, IntArray]:
    """Starts and stops of all values in ``data``: each (columns, samples) int64."""
    sizes = [fixed_size(encoding) for encoding in encodings.values()]
    variable = sum(size is None for size in sizes)
    begins, ends = offsets[:-1], offsets[1:]
    if (ends - begins < 4 * variable).any():
        row = int(np.argmax(ends - begins < 4 * variable))
        raise _misfit(chunk, row, offsets)
    heads = gather(data, begins, _U32, (variable,)).astype(np.int64)
    bounds = np.empty((len(sizes) + 1, chunk.samples), np.int64)
    bounds[0] = begins + 4 * variable
    next_head = 0
    for index, size in enumerate(sizes):
        if size is None:
            bounds[index + 1] = bounds[index] + heads[:, next_head]
            next_head += 1
        else:
            bounds[index + 1] = bounds[index] + size
    if (bounds[-1] != ends).any():
        raise _misfit(chunk, int(np.argmax(bounds[-1] != ends)), offsets)
    return bounds[:-1], bounds[1:]


def _misfit(chunk: ChunkRef, row: int, offsets: IntArray) -> FormatError:
    problem = f"the columns of its sample {chunk.first_row + row} do not fill the sample; write the shard again"
    return FormatError(chunk.shard.key, problem, offset=chunk.offset + int(offsets[row]))
