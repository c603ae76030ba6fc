"""Interface of a shard format: find the chunks of a shard, and open a chunk's bytes as columns.

A format holds no state but its configuration. The loader's threads call it concurrently.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from ...storage import ByteRange, ObjectInfo, Store

if TYPE_CHECKING:
    from ..columns import Block

# Chunks of shards that may be cut anywhere between samples are made about this long: long enough that a GET's
# latency is small beside its transfer, short enough that hundreds fit into memory.
CHUNK_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ShardTask:
    """A shard to be indexed, with what the format already knows about it (from an ``index.json``, say)."""

    info: ObjectInfo
    hint: Any = None

    @property
    def companion(self) -> ObjectInfo | None:
        """The object that says how the shard is read, such as an ``.idx``."""
        return self.hint if isinstance(self.hint, ObjectInfo) else None


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
    """The chunks of one shard in sample order, and its schema: JSON-able, and what ``merge_schema`` takes.

    ``doubt`` says what may be wrong with the samples, though they can be read; mostly "".
    """

    chunks: Sequence[ChunkSpan]
    schema: Mapping[str, Any]
    doubt: str = ""


@dataclass(frozen=True, slots=True)
class ChunkRef:
    """A chunk to be opened: its shard, its bytes, its samples, and the ordinal of its first sample in the shard.

    ``memory`` is what the index estimates that it takes once opened, ``memory_limit`` the most that it may, in bytes.
    """

    shard: ObjectInfo
    offset: int
    length: int
    samples: int
    first_row: int
    memory: int = 0
    memory_limit: int = sys.maxsize

    @property
    def byte_range(self) -> ByteRange:
        return ByteRange(self.offset, self.offset + self.length)


class Header(Protocol):
    """Header of a shard, kept to open its chunks with. ``nbytes`` estimates the memory that it takes."""

    @property
    def nbytes(self) -> int: ...


class ShardFormat(Protocol):
    """Reads one kind of shard. Implementations are small classes in the files beside this one.

    ``name`` is a short word that is kept in the manifest: 'tar', 'parquet', ... ``suffixes``, lower-case, are the
    endings that mark an object as a shard of this format, in any case. ``other_suffixes`` mark
    shards only if no other object is one by its name, and the caller gave the format: other files have them, too.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    other_suffixes: ClassVar[tuple[str, ...]]

    def config(self) -> dict[str, Any]:
        """The format's configuration, JSON-able: ``Format(**format.config())`` makes an equal one."""
        ...

    def shards(self, store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> list[ShardTask]:
        """The shards among the objects of a data set, in sample order.

        Companions (an index.json, an .idx) and hidden objects are left out; keys that the caller ``named`` one by one
        may be hidden.
        """
        ...

    def index_shard(self, store: Store, task: ShardTask) -> ShardIndex:
        """Find the chunks of one shard, reading no more of it than necessary.

        Chunks without samples are left out; a shard without samples has no chunks.

        Raises:
            FormatError: the bytes are not such a shard; names the shard and the offset.
        """
        ...

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        """One schema for the data set so far and ``shard``. Raises FormatError where the two contradict each other."""
        ...

    def open_shard(self, store: Store, shard: ObjectInfo) -> Header | None:
        """Read what opening a chunk needs beside its own bytes (a footer, say); None for most formats.

        It is kept as long as memory allows, and read again where it is needed after that.
        """
        ...

    def chunk_ranges(self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None) -> list[ByteRange]:
        """The byte ranges to read for ``columns`` of a chunk (None: all of them)."""
        ...

    def chunk_parts(self, chunk: ChunkRef, header: Any) -> list[ByteRange]:
        """The byte ranges that ``chunk_ranges`` may return, or joins, beside the whole chunk: each gets a checksum."""
        ...

    def opened_bytes(
        self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None, schema: Mapping[str, Any]
    ) -> int:
        """About how many bytes ``columns`` of a chunk take while it is opened, as far as that is known before."""
        ...

    @property
    def opens_pieces(self) -> bool:
        """True if ``open_pieces`` works, so that a chunk that is too large for memory can be opened onto the disk."""
        ...

    @property
    def is_framed(self) -> bool:
        """True if the places of values depend only on the bytes between them, and not on the values' own bytes."""
        ...

    @property
    def opens_in_place(self) -> bool:
        """True if opening a chunk leaves values in its bytes, without a look at them, until they are copied."""
        ...

    def open_pieces(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
        rows: int,
    ) -> Iterator[Block]:
        """As ``open_chunk``, in blocks of at most ``rows`` samples, one after another."""
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
            MemoryLimitError: it grows beyond its ``memory_limit``.
            ConfigError: a column that the data set does not have, with those that it has.
        """
        ...
