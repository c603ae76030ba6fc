"""Interface of a shard format: find the chunks of a shard, and open a chunk's bytes as columns.

A format holds no state but its configuration. The loader's threads call it concurrently. Beside it, what formats share:
names of shards, chunks of about one size, errors that name the shard, and a base that reads a chunk as one byte range.
"""

from __future__ import annotations

import struct
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import pyarrow as pa

from ...storage import ByteRange, ObjectInfo, PenstockError, Store
from ..errors import ConfigError, FormatError, MemoryLimitError
from .schema import merge_columns

if TYPE_CHECKING:
    from ..columns import Block, IntArray


# Of the formats, all in lower case; in one place, so that a name is known without the libraries of every format.
CODEC_SUFFIXES = (".gz", ".bz2", ".zst", ".zstd")
SUFFIXES: Mapping[str, tuple[str, ...]] = {
    "tar": (*(".tar" + codec for codec in ("", *CODEC_SUFFIXES)), ".tgz", ".tbz2", ".tzst"),
    "parquet": (".parquet", ".pq", ".parq"),
    "arrow": (".arrow", ".arrows", ".feather", ".ipc"),
    "tokens": (".bin", ".tokens", ".u16", ".u32"),
    "mds": (".mds", *(f".mds.{codec}" for codec in ("zstd", "zst", "gz", "bz2", "br", "snappy"))),
    "jsonl": tuple(plain + codec for plain in (".jsonl", ".ndjson", ".json-lines") for codec in ("", *CODEC_SUFFIXES)),
    "token_documents": (),  # those of tokens, which are detected as such
}

_SYSTEM_FILES = frozenset({"thumbs.db", "ehthumbs.db", "desktop.ini", ".ds_store", "icon\r"})
_SYSTEM_FOLDERS = frozenset({"__macosx", "@eadir", "$recycle.bin", "system volume information"})


def is_hidden(key: str, given: str = "") -> bool:
    """Return whether a folder or file in ``key`` starts with '.' or '_', as job markers and partial output do.

    Such objects (``_SUCCESS``, ``.crc`` files, ``_temporary/...``) are not data, by a convention as old as Hadoop.
    ``given`` is what the caller wrote of the key, its beginning: a name that starts in it is no accident.
    """
    parts = key.removeprefix(given).split("/")
    if given and not given.endswith("/"):
        del parts[0]
    return any(part.startswith((".", "_")) for part in parts)


def is_system(key: str) -> bool:
    """Return whether a file is one that Windows, macOS or a NAS keeps in folders, and none of the user's."""
    *folders, name = key.lower().split("/")
    return name in _SYSTEM_FILES or any(folder in _SYSTEM_FOLDERS for folder in folders)


def is_text(key: str) -> bool:
    """Return whether a name is Unicode: that of a local file may be any bytes, which Python keeps as surrogates."""
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def has_suffix(key: str, suffixes: tuple[str, ...]) -> bool:
    """Return whether ``key`` ends in one of ``suffixes``, in any case; the suffixes are lower-case."""
    return key.lower().endswith(suffixes)


def find_shards(
    listing: Sequence[ObjectInfo], suffixes: tuple[str, ...], named: Collection[str] = ()
) -> list[ObjectInfo]:
    """The objects with one of ``suffixes`` that are not hidden, or that the caller ``named`` one by one."""
    return [
        info for info in listing if has_suffix(info.key, suffixes) and (info.key in named or not is_hidden(info.key))
    ]


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


def cut_samples(starts: IntArray, stops: IntArray, chunk_bytes: int, counts: IntArray | None = None) -> list[ChunkSpan]:
    """Runs of whole samples of at most ``chunk_bytes``, or of one sample that is longer.

    ``starts`` and ``stops``: (samples,) int64 byte offsets, rising. With ``counts`` each is a unit of several samples.
    """
    chunks: list[ChunkSpan] = []
    first, count = 0, len(starts)
    while first < count:
        offset = int(starts[first])
        after = max(int(np.searchsorted(stops, offset + chunk_bytes, side="right")), first + 1)
        length = int(stops[after - 1]) - offset
        samples = after - first if counts is None else int(counts[first:after].sum())
        chunks.append(ChunkSpan(offset, length, samples, length))
        first = after
    return chunks


def join_spans(spans: Iterable[ChunkSpan], chunk_bytes: int, gap_bytes: int = 0) -> list[ChunkSpan]:
    """Neighbours joined into chunks of at most ``chunk_bytes``, where at most ``gap_bytes`` lie between them."""
    chunks: list[ChunkSpan] = []
    for span in spans:
        last = chunks[-1] if chunks else None
        if last is not None and 0 <= span.offset - last.offset - last.length <= gap_bytes:
            length = span.offset + span.length - last.offset
            if length <= chunk_bytes:
                chunks[-1] = ChunkSpan(last.offset, length, last.samples + span.samples, last.memory + span.memory)
                continue
        chunks.append(span)
    return chunks


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


# Exceptions that parsers and NumPy raise on numbers and structures that they do not expect.
_OF_BAD_BYTES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    BufferError,
    EOFError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
    pa.ArrowException,
    struct.error,
)


@contextmanager
def explain_failures(shard: str, doing: str, offset: int | None = None) -> Iterator[None]:
    """Raise FormatError for what damaged or hostile bytes cause, and MemoryLimitError for a failed allocation.

    ``doing`` completes "cannot be ...". A failed allocation says nothing about the bytes, whoever met it first.
    """
    try:
        yield
    except PenstockError as exc:
        if isinstance(exc.__cause__, MemoryError):
            raise _no_memory(shard, doing, exc.__cause__) from exc
        raise
    except MemoryError as exc:
        raise _no_memory(shard, doing, exc) from exc
    except _OF_BAD_BYTES as exc:
        problem = (
            f"cannot be {doing} ({type(exc).__name__}: {exc}); fetch or write it again, or index the data set again"
        )
        raise FormatError(shard, problem, offset=offset) from exc


def _no_memory(shard: str, doing: str, exc: BaseException) -> MemoryLimitError:
    return MemoryLimitError(
        f"{shard}: memory ran out while it was {doing} ({exc or type(exc).__name__}); give the process more memory, "
        "lower memory_limit= and the number of ranks on this machine, or write the data in smaller row groups or shards"
    )
