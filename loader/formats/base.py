"""Base of the formats that find shards by suffix and read a chunk as one byte range of its shard."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from ..errors import ConfigError, FormatError, MemoryLimitError
from .names import find_shards
from .schema import merge_columns
from .shard import ChunkRef, Header, ShardTask

if TYPE_CHECKING:
    from ...storage import ByteRange, ObjectInfo, Store
    from ..columns import Block


def check_whole(name: str, value: object) -> None:
    """Raise ConfigError unless a setting is a whole number."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}={value!r}: must be a whole number")


@dataclass(frozen=True, slots=True)
class BaseFormat:
    """The parts of ``ShardFormat`` that most formats share; each format overrides what differs.

    A format is a frozen dataclass with a field ``chunk_bytes``: chunks are cut about that long.
    """

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]
    other_suffixes: ClassVar[tuple[str, ...]] = ()
    min_chunk_bytes: ClassVar[int] = 1
    # Whether a column may be in some shards alone, as long as nobody reads it.
    may_lack_columns: ClassVar[bool] = False

    @property
    def chunk_bytes(self) -> int:
        raise NotImplementedError

    def __post_init__(self) -> None:
        check_whole("chunk_bytes", self.chunk_bytes)
        if self.chunk_bytes < self.min_chunk_bytes:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}: must be at least {self.min_chunk_bytes}")

    def config(self) -> dict[str, Any]:
        return asdict(self)

    def shards(self, store: Store, listing: Sequence[ObjectInfo], named: Collection[str] = ()) -> list[ShardTask]:
        return [ShardTask(info) for info in find_shards(listing, self.suffixes, named)]

    def merge_schema(self, known: Mapping[str, Any], new: Mapping[str, Any], shard: str) -> Mapping[str, Any]:
        return merge_columns(known, new, shard, may_lack=self.may_lack_columns)

    def open_shard(self, store: Store, shard: ObjectInfo) -> Header | None:
        return None

    def chunk_ranges(self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None) -> list[ByteRange]:
        return [chunk.byte_range]

    def chunk_parts(self, chunk: ChunkRef, header: Any) -> list[ByteRange]:
        return []

    def opened_bytes(
        self, chunk: ChunkRef, header: Any, columns: Sequence[str] | None, schema: Mapping[str, Any]
    ) -> int:
        return chunk.memory

    @property
    def opens_pieces(self) -> bool:
        return False

    @property
    def is_framed(self) -> bool:
        return False

    @property
    def opens_in_place(self) -> bool:
        return False

    def open_pieces(
        self,
        chunk: ChunkRef,
        header: Any,
        parts: Sequence[memoryview],
        columns: Sequence[str] | None,
        schema: Mapping[str, Any],
        rows: int,
    ) -> Iterator[Block]:
        raise NotImplementedError


def refuse_empty(shard: ObjectInfo) -> None:
    """Raise FormatError where the shard has no bytes."""
    if shard.size == 0:
        raise FormatError(shard.key, "holds no bytes; remove it or write it again", offset=0)


def whole_part(chunk: ChunkRef, parts: Sequence[memoryview]) -> memoryview:
    """The bytes of a chunk that is read as one range. Raises FormatError where some are missing."""
    data = parts[-1]
    if data.nbytes != chunk.length:
        raise FormatError(
            chunk.shard.key,
            f"got {data.nbytes} bytes of a chunk of {chunk.length}; the shard was cut off or changed: index it again",
            offset=chunk.offset,
        )
    return data


def refuse_large(chunk: ChunkRef, needed: int, *, at_least: bool = False) -> None:
    """Raise MemoryLimitError where a chunk takes more memory than it may; ``at_least`` where ``needed`` is not all."""
    if needed > chunk.memory_limit:
        raise MemoryLimitError(
            f"{chunk.shard.key} at byte {chunk.offset}: opening this chunk of {chunk.samples:,} samples takes "
            f"{'more than' if at_least else 'about'} {needed:,} bytes of memory, and the limit is "
            f"{chunk.memory_limit:,}; raise memory_limit=, read fewer columns, or write the data in smaller row "
            "groups, record batches or compressed shards"
        )


def refuse_change(chunk: ChunkRef, samples: int) -> None:
    """Raise FormatError where an opened chunk does not hold the samples that the index counted."""
    if samples != chunk.samples:
        raise FormatError(
            chunk.shard.key,
            f"the chunk holds {samples} samples, the index says {chunk.samples}: the shard changed after it was "
            "indexed; index it again",
            offset=chunk.offset,
        )
