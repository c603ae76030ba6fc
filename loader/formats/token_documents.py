"""Token files whose samples are documents: found by Megatron's index, or by the token that ends each."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from ...storage import NotFoundError, ObjectInfo, Store
from ...storage.suggestions import unknown_choice
from ..arrow_arrays import wrap_numbers
from ..columns import AnyArray, Block, IntArray, ObjectColumn
from ..errors import ConfigError, FormatError
from .schema import choose_columns
from .shard import (
    CHUNK_BYTES,
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
from .tokens import (
    DTYPES,
    INDEX_AGAIN,
    SUFFIX_DTYPES,
    find_token_shards,
    index_keys,
    read_bounds,
    read_megatron_index,
    refuse_header,
)
from .windows import ShardWindows


@dataclass(frozen=True, slots=True)
class DocumentBounds:
    """Bounds of the documents of a shard: ``bounds`` (documents + 1,) int64, in tokens."""

    bounds: IntArray

    @property
    def nbytes(self) -> int:
        return int(self.bounds.nbytes)


@dataclass(frozen=True, slots=True)
class TokenDocumentsFormat(BaseFormat):
    """Sample i of a shard is its document i, a list of tokens of any length: what ``Packing`` makes sequences of.

    A shard is a file of Megatron's with its .idx beside it, which says where documents begin. Or, with ``eos``, it is a
    raw little-endian file of ``dtype`` (.bin, .tokens; .u16 and .u32 fix their own dtype) whose documents end with that
    token; its index reads all of it once. Tokens after the last ``eos`` are a document, too.
    """

    name: ClassVar[str] = "token_documents"
    suffixes: ClassVar[tuple[str, ...]] = SUFFIXES["token_documents"]

    eos: int | None = None
    dtype: str = "uint16"
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        BaseFormat.__post_init__(self)
        if self.dtype not in DTYPES:
            raise ConfigError(unknown_choice("dtype", self.dtype, DTYPES))
        if self.eos is not None and (isinstance(self.eos, bool) or not isinstance(self.eos, int) or self.eos < 0):
            hint = "left out, Megatron's .idx files tell where documents end"
            raise ConfigError(f"eos={self.eos!r}: token ids are whole numbers from 0 on; {hint}")

    def shards(self, store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> list[ShardTask]:
        """Token files; the hint is the Megatron index beside one, if there is one."""
        return find_token_shards(listing, named)

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        refuse_empty(task.info)
        if task.hint is not None:
            dtype = np.dtype(read_megatron_index(store, task.hint, task.info))
        else:
            dtype = np.dtype(SUFFIX_DTYPES.get(PurePosixPath(task.info.key).suffix.lower(), self.dtype))
        if self.eos is None:
            if task.hint is None:
                raise FormatError(
                    task.info.key,
                    "has no .idx of Megatron's beside it that says where documents begin; give the token that ends "
                    "each, as in format=TokenDocumentsFormat(eos=2) (--eos 2)",
                )
            spans = _cut(read_bounds(store, task.hint, task.info), dtype.itemsize, self.chunk_bytes)
        else:
            spans = self._scan(store, task.info, dtype)
        column = {"type": f"list<{dtype.name}>", "nulls": False}
        return ShardIndex(spans, {"columns": {"tokens": column}, "seen_in": task.info.key})

    def _scan(self, store: Store, shard: ObjectInfo, dtype: np.dtype[Any]) -> list[ChunkSpan]:
        """Runs of whole documents of about ``chunk_bytes``, or of one longer document."""
        size = dtype.itemsize
        if self.eos is not None and self.eos > np.iinfo(dtype).max:
            raise FormatError(
                shard.key, f"is read as {dtype.name}, of which no token is eos={self.eos}; give its dtype"
            )
        if shard.size % size:
            raise FormatError(
                shard.key,
                f"its {shard.size} bytes are not a whole number of {dtype.name} tokens; give its dtype, or write it "
                "again",
                offset=shard.size - shard.size % size,
            )
        spans: list[ChunkSpan] = []
        offset, wanted = 0, max(size, self.chunk_bytes // size * size)
        with ShardWindows(store, shard) as windows:
            while offset < shard.size:
                run = windows.read(offset, wanted)[:wanted]
                tokens = np.frombuffer(run, dtype.newbyteorder("<"), len(run) // size)
                bounds = split(tokens, self.eos)
                if offset + wanted < shard.size:
                    if tokens[-1] != self.eos:
                        bounds = bounds[:-1]  # the last document goes on
                    if len(bounds) < 2:
                        wanted *= 2
                        continue
                length = int(bounds[-1]) * size
                documents = len(bounds) - 1
                spans.append(ChunkSpan(offset, length, documents, length + 8 * documents))
                offset, wanted = offset + length, max(size, self.chunk_bytes // size * size)
        return spans

    def open_shard(self, store: Store, shard: ObjectInfo) -> DocumentBounds | None:
        if self.eos is not None:
            return None
        for key in index_keys(shard.key):
            try:
                return DocumentBounds(read_bounds(store, store.head(key), shard))
            except NotFoundError:
                continue
        raise FormatError(shard.key, f"its .idx is gone, which says where documents begin; {INDEX_AGAIN}")

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: DocumentBounds | None,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        names = choose_columns(schema["columns"], columns)
        stored = schema["columns"]["tokens"]["type"].removeprefix("list<").removesuffix(">")
        if stored not in DTYPES:
            raise FormatError(
                chunk.shard.key, f"its index says that its tokens are {stored!r}; {INDEX_AGAIN}", offset=chunk.offset
            )
        data = whole_part(chunk, parts)
        refuse_header(chunk, data)
        tokens = np.frombuffer(data, np.dtype(stored).newbyteorder("<"))
        if header is None:
            bounds = split(tokens, self.eos)
        else:
            bounds = header.bounds[chunk.first_row : chunk.first_row + chunk.samples + 1]
            at = bounds[[0, -1]] * tokens.itemsize if len(bounds) else np.zeros(2, np.int64)
            if at.tolist() != [chunk.offset, chunk.offset + chunk.length]:
                raise FormatError(
                    chunk.shard.key,
                    f"its .idx says that documents {chunk.first_row} to {chunk.first_row + chunk.samples} are bytes "
                    f"{at[0]} to {at[1]}, the index of the data set {chunk.offset} to {chunk.offset + chunk.length}; "
                    f"{INDEX_AGAIN}",
                    offset=chunk.offset,
                )
            bounds = bounds - bounds[0]
        refuse_change(chunk, len(bounds) - 1)
        if not names:
            return Block(chunk.samples, 0, {})
        values = pa.Array.from_buffers(pa.from_numpy_dtype(np.dtype(stored)), len(tokens), [None, pa.py_buffer(data)])
        lists = pa.LargeListArray.from_arrays(wrap_numbers(bounds), values)
        return Block(chunk.samples, data.nbytes + bounds.nbytes, {"tokens": ObjectColumn(lists)})


def split(tokens: AnyArray, eos: int | None) -> IntArray:
    """Bounds (documents + 1,) int64 of the documents that end with ``eos``, or where the tokens end."""
    ends = np.flatnonzero(tokens == eos) + 1
    if len(tokens) and (not len(ends) or ends[-1] != len(tokens)):
        ends = np.append(ends, len(tokens))
    return np.concatenate([np.zeros(1, np.int64), ends])


def _cut(bounds: IntArray, itemsize: int, chunk_bytes: int) -> list[ChunkSpan]:
    """Runs of whole documents of at most ``chunk_bytes``, or of one that is longer."""
    spans: list[ChunkSpan] = []
    first, last = 0, len(bounds) - 1
    while first < last and bounds[first] < bounds[last]:
        most = int(bounds[first]) + chunk_bytes // itemsize
        stop = max(first + 1, int(np.searchsorted(bounds, most, side="right")) - 1)
        while bounds[stop] == bounds[first]:  # a chunk has bytes: documents without tokens go with the next
            stop += 1
        if bounds[stop] == bounds[last]:
            stop = last
        length = int(bounds[stop] - bounds[first]) * itemsize
        spans.append(ChunkSpan(int(bounds[first]) * itemsize, length, stop - first, length + 8 * (stop - first)))
        first = stop
    return spans
