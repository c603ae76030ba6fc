"""What a shard format does: find the chunks of a shard, and open a chunk's bytes as columns.

A format holds no state but its configuration. The loader's threads call it concurrently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from ...storage import ByteRange, ObjectInfo, Store

IntArray = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
AnyArray = np.ndarray[tuple[int, ...], np.dtype[Any]]

# Chunks of shards that may be cut anywhere between samples are made about this long: long enough that a GET's
# latency is small beside its transfer, short enough that hundreds fit into memory.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to be indexed, with what the format already knows of it (from an ``index.json``, say)."""

    info: ObjectInfo
    hint: Any = None


@dataclass(frozen=True, slots=True)
class ChunkSpan:
    """One chunk as the index finds it: ``length`` bytes from ``offset``, holding ``samples`` samples.

    ``memory`` is an estimate of the bytes that the opened chunk takes (after decompression).
    """

    offset: int
    length: int
    samples: int
    memory: int


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The chunks of one shard in sample order, and its schema: JSON-able, and what ``merge_schema`` takes."""

    chunks: Sequence[ChunkSpan]
    schema: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A chunk to be opened: its shard, its bytes, its samples, and the ordinal of its first sample in the shard."""

    shard: ObjectInfo
    offset: int
    length: int
    samples: int
    first_row: int

    @property
    def byte_range(self) -> ByteRange:
        return ByteRange(self.offset, self.offset + self.length)


@dataclass(frozen=True, slots=True)
class ArrayColumn:
    """Values of one shape and dtype: ``values`` is (samples, *shape)."""

    values: AnyArray

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)


@dataclass(frozen=True, slots=True)
class BytesColumn:
    """Values that are slices of one buffer: value i is ``buffer[starts[i]:stops[i]]``, missing where starts[i] < 0.

    ``text`` says that the values are UTF-8 and are handed out as str; ``ascii`` may hold the whole buffer as one, where
    it is ASCII. The buffer is shared by the columns of a block and is counted once, in ``Block.nbytes``.
    """

    buffer: memoryview
    starts: IntArray
    stops: IntArray
    text: bool = False
    ascii: str | None = None

    def take(self, rows: IntArray) -> list[Any]:
        """The values of ``rows`` as bytes or str of their own; None where missing."""
        starts, stops = self.starts[rows].tolist(), self.stops[rows].tolist()
        # A slice of bytes or str is a copy in one step, where a view would be made first, and thrown away.
        whole = self.ascii if self.text else self.buffer.obj
        if whole is not None and type(whole) in (bytes, str) and len(whole) == len(self.buffer):  # type: ignore[arg-type]
            return [whole[a:b] if a >= 0 else None for a, b in zip(starts, stops, strict=True)]  # type: ignore[index]
        buffer = self.buffer
        if self.text:
            return [str(buffer[a:b], "utf-8") if a >= 0 else None for a, b in zip(starts, stops, strict=True)]
        return [bytes(buffer[a:b]) if a >= 0 else None for a, b in zip(starts, stops, strict=True)]

    def copies(self, rows: IntArray) -> list[memoryview | None]:
        """The values of ``rows`` as views of bytes of their own, for decoders; None where missing.

        Views into the buffer would keep it in memory until the last of them is decoded.
        """
        return [None if value is None else memoryview(value) for value in self.take(rows)]


@dataclass(frozen=True, slots=True)
class ObjectColumn:
    """Values that are neither: strings, lists, structs and the like, kept as an Arrow array until they are taken."""

    values: pa.Array

    @property
    def nbytes(self) -> int:
        return int(self.values.nbytes)

    def take(self, rows: IntArray) -> list[Any]:
        """The values of ``rows`` as Python objects; None where null."""
        taken: list[Any] = self.values.take(pa.array(rows)).to_pylist()
        return taken


Column = ArrayColumn | BytesColumn | ObjectColumn


@dataclass(frozen=True, slots=True)
class Records:
    """Scalar columns laid row by row: ``rows`` is (samples,) of opaque bytes, each made of ``names`` and ``dtypes``.

    All dtypes have one item size. Formats give columns; the loader makes records of them.
    """

    names: tuple[str, ...]
    dtypes: tuple[np.dtype[Any], ...]
    rows: AnyArray


@dataclass(frozen=True, slots=True)
class Block:
    """An opened chunk: columns of ``samples`` values each, taking ``nbytes`` of memory in all."""

    samples: int
    nbytes: int
    columns: Mapping[str, Column] = field(default_factory=dict)
    records: tuple[Records, ...] = ()


class ShardFormat(Protocol):
    """Reads one kind of shard. Implementations are small classes in the files beside this one."""

    @property
    def name(self) -> str:
        """A short word that is kept in the manifest: 'tar', 'parquet', ..."""
        ...

    def config(self) -> dict[str, Any]:
        """What the format was configured with, JSON-able: ``Format(**format.config())`` makes an equal one."""
        ...

    def shards(self, store: Store, listing: Sequence[ObjectInfo]) -> list[ShardTask]:
        """The shards among the objects of a data set, in sample order; companions (indexes, footers) are left out."""
        ...

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        """Find the chunks of one shard, reading no more of it than must be.

        Chunks without samples are left out; a shard without samples has no chunks.

        Raises:
            FormatError: the bytes are not such a shard; names the shard and the offset.
        """
        ...

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        """One schema for the data set so far and ``shard``. Raises FormatError where the two contradict."""
        ...

    def open_shard(self, store: Store, shard: ObjectInfo) -> Any:
        """What is needed of a shard, beside a chunk's bytes, to open its chunks (a footer, say); None mostly.

        Called once a shard, and kept; so it must be small.
        """
        ...

    def chunk_ranges(self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None) -> list[ByteRange]:
        """The byte ranges to read for ``columns`` of a chunk (None: all of them)."""
        ...

    def open_chunk(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
    ) -> Block:
        """Open the bytes of ``chunk_ranges``, in its order, as columns.

        Raises:
            FormatError: the bytes are not such a chunk; names shard and offset.
            ConfigError: a column that the data set does not have, with those that it has.
        """
        ...
