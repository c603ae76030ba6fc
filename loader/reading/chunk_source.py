"""Read one chunk from its store and open it as columns: checked, and read again if its bytes are wrong."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage import ByteRange, DiscardingStore, LocalStore, Store
from ...storage.store import is_encrypted
from ...storage.threads.daemon_pool import DaemonPool
from ..columns import Block, pack_records
from ..counters import Counters
from ..errors import FormatError
from ..formats.hive import Partitions
from ..formats.schema import add_marks, expect_nulls
from ..formats.shard import BaseFormat, explain_failures, refuse_large
from ..limits import usable_memory
from .checksum import ChunkChecks
from .layouts import HeaderCache, Layouts
from .mapped import MappedChunks

if TYPE_CHECKING:
    from ...storage.options import MappedReads
    from ..dataset.manifest import Manifest
    from ..formats.shard import ChunkRef, ShardFormat
    from .layouts import KeptLayouts

_HEADER_BYTES = 64 << 20  # until a pipeline sets its own limit
# However small the limit: one chunk of this size is always read.
ALWAYS_BYTES = 64 << 20
_AHEAD_ON_DISK = 8  # chunks that are requested at a time
_PIECE_BYTES = 8 << 20  # of a chunk that is fetched and opened onto the disk
_REFETCHES = 3


@dataclass(frozen=True, slots=True)
class Fetched:
    """A chunk's bytes, not yet checked: the ``parts`` that ``ranges`` of its shard hold.

    ``bytes_on_disk``: its bytes once opened, if they are too many for memory; its parts then lie on the disk.
    ``mapped``: the maps that its only part, the file itself, belongs to.
    """

    header: Any
    ranges: Sequence[ByteRange]
    parts: Sequence[memoryview]
    bytes_on_disk: int | None
    mapped: MappedChunks | None


class AvoidedError(FormatError):
    """A chunk that is known to be bad, and was not tried."""


def reads_locally(store: Store) -> bool:
    """Return whether a store reads from this machine's disks."""
    return isinstance(getattr(store, "inner", store) if is_encrypted(store) else store, LocalStore)


class ChunkSource:
    """Reads and opens one chunk at a time. Called by the fetch threads.

    Mutable state: the shards' headers, the layouts of chunks, and the most that one chunk may take: until it is set,
    ``memory_limit`` bytes or what the process may use.
    """

    def __init__(
        self,
        manifest: Manifest,
        shard_format: ShardFormat,
        store: Store,
        columns: Sequence[str] | None,
        counters: Counters,
        memory_limit: int | None = None,
        avoided: frozenset[int] = frozenset(),
        *,
        maps_files: MappedReads = False,
        kept: KeptLayouts | None = None,
    ) -> None:
        """``maps_files``: values may be copied from files when they are due; "views": they will be views of them.

        ``kept``: layouts found before, if any.
        """
        self.manifest = manifest
        self._schema = manifest.schema
        self._partitions = Partitions.of(manifest.schema, columns)
        self._shapes: Mapping[str, tuple[int, ...]] = {}  # of columns whose nulls are marked
        self._avoided = avoided
        self.columns = columns
        self._format = shard_format
        self._store = store
        self._counters = counters
        self._checks = ChunkChecks(manifest, shard_format)
        self._headers = HeaderCache(shard_format, store, counters, budget_bytes=_HEADER_BYTES)
        self._layouts = Layouts(_HEADER_BYTES, is_framed=shard_format.is_framed, kept=kept)
        # Nothing is decrypted onto a disk.
        self._memory_limit = usable_memory() if memory_limit is None else max(memory_limit, ALWAYS_BYTES)
        self._onto_disk = shard_format.opens_pieces and not is_encrypted(store)
        # Of a disk a header takes less time than a thread.
        opens: Any = getattr(type(shard_format), "open_shard", None)
        maps = maps_files if shard_format.opens_in_place else False
        self._mapped = MappedChunks.of(store, views=maps == "views") if maps else None
        self._has_headers = opens is not BaseFormat.open_shard and not self.is_local

    def apart(self, columns: Sequence[str] | None) -> ChunkSource:
        """A source of the same chunks and limit that reads ``columns``, with headers and counters of its own."""
        source = ChunkSource(
            self.manifest,
            self._format,
            self._store,
            columns,
            Counters(),
            self._memory_limit,
            self._avoided,
        )
        source._checks = self._checks  # which warns once
        source._use(self._schema, self._shapes)
        return source

    def mark_nulls(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Mark the nulls of these columns, whether the data set has any or not; called before any chunk is read.

        ``shapes`` are those of single values, for formats that know no nulls and may not know the shape either.
        """
        self._use(expect_nulls(self._schema, shapes), dict(shapes))

    def _use(self, schema: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._schema, self._partitions, self._shapes = schema, Partitions.of(schema, self.columns), shapes

    @property
    def _marked(self) -> Mapping[str, tuple[int, ...]]:
        return {name: of for name, of in self._shapes.items() if self.columns is None or name in self.columns}

    @property
    def layout(self) -> Hashable:
        """Key of the memory layout of opened chunks' values: rows of sources with other layouts are gathered apart."""
        columns, read = self._schema.get("columns", {}), self.columns
        names = tuple(columns if read is None else read) if columns else tuple(sorted(read or self.manifest.fields))
        types = ((name, str(columns[name]) if name in columns else None) for name in names)
        kind = "table" if self.manifest.format in ("parquet", "arrow") else self.manifest.format
        return kind, tuple(types), tuple(sorted(self._marked))

    def load(self, index: int) -> Block:
        """Fetch and open a chunk: what ``fetch`` and ``open`` do, and raise."""
        return self.open(index, self.fetch(index))

    def fetch(self, index: int) -> Fetched | None:
        """Fetch the bytes of a chunk, or leave that to ``open``: what came was wrong, or none are wanted.

        Raises:
            StorageError, ConfigError.
            MemoryLimitError: the chunk alone takes more than it may.
            AvoidedError: the chunk is one of those to avoid.
        """
        chunk = self._refer(index)
        if index in self._avoided:
            raise AvoidedError(chunk.shard.key, "avoid= names this chunk", offset=chunk.offset)
        if self._reads_nothing:
            return None
        try:
            return self._fetch(chunk)
        except FormatError:
            self._forget(chunk)
            return None

    def open(self, index: int, fetched: Fetched | None) -> Block:
        """Open a chunk that was fetched. Wrong bytes are fetched anew, past any cache, thrice before they are an error.

        Damage at rest is the same each time; damage on the way is not.

        Raises:
            StorageError, FormatError, ChecksumError, ConfigError, MemoryLimitError.
        """
        chunk = self._refer(index)
        if self._reads_nothing:
            return self._partitions.add_to(Block(chunk.samples, 0), chunk)
        for _ in range(_REFETCHES):
            try:
                if fetched is not None:
                    return self._open_fetched(index, chunk, fetched)
            except FormatError:
                self._forget(chunk)
            self._counters.add(refetched_chunks=1)
            fetched = None  # before there is memory for another
            fetched = self.fetch(index)
        return self._open_fetched(index, chunk, fetched or self._fetch(chunk))

    @property
    def is_mapped(self) -> bool:
        """True if values are read from files when they are due."""
        return self._mapped is not None

    @property
    def is_local(self) -> bool:
        """True if chunks are read from this machine's disks."""
        return reads_locally(self._store)

    @property
    def _reads_nothing(self) -> bool:
        return self._partitions.stored is not None and not self._partitions.stored

    def _refer(self, index: int) -> ChunkRef:
        return self.manifest.chunk(index, self._memory_limit)

    def _forget(self, chunk: ChunkRef) -> None:
        """Drop what is kept of a chunk, in memory and on the node's disk."""
        try:
            header = self._headers.get(chunk.shard)  # another thread may have forgotten it a moment ago
        except FormatError:
            return  # then nothing of the chunk was read
        self._headers.forget(chunk.shard)
        if isinstance(self._store, DiscardingStore) and chunk.shard.etag is not None:
            from .on_disk import cut_ranges

            ranges = self._format.chunk_ranges(chunk, header, self._partitions.stored)
            for byte_range in {*ranges, *cut_ranges(ranges, _PIECE_BYTES)}:
                self._store.discard(chunk.shard.key, byte_range, etag=chunk.shard.etag)

    def _fetch(self, chunk: ChunkRef) -> Fetched:
        started = time.perf_counter()
        with explain_failures(chunk.shard.key, "opened"):
            header, early = self._fetch_both(chunk) if self._is_far(chunk) else (self._headers.get(chunk.shard), None)
            ranges = self._format.chunk_ranges(chunk, header, self._partitions.stored)
            stored, schema = self._partitions.stored, self._partitions.schema
            needed = self._format.opened_bytes(chunk, header, stored, schema)
        is_large = needed > chunk.memory_limit
        if is_large and not self._onto_disk:
            refuse_large(chunk, needed)
        files = None if is_large else self._mapped
        mapped = None if files is None else files.map(chunk, ranges)
        if is_large:
            from .on_disk import fetch_onto_disk

            parts = fetch_onto_disk(self._store, chunk, ranges, needed, _PIECE_BYTES)
        elif mapped is not None:
            parts = [mapped]
        elif early is not None and ranges == [chunk.byte_range]:
            parts = [early]
        elif len(ranges) == 1:
            parts = [self._store.get(chunk.shard.key, ranges[0], etag=chunk.shard.etag)]
        else:
            parts = self._store.get_ranges(chunk.shard.key, ranges, etag=chunk.shard.etag)
        self._counters.add(fetch_s=time.perf_counter() - started)
        return Fetched(header, ranges, parts, needed if is_large else None, None if mapped is None else files)

    def _open_fetched(self, index: int, chunk: ChunkRef, fetched: Fetched) -> Block:
        started = time.perf_counter()
        self._checks.check(index, chunk, fetched.header, fetched.ranges, fetched.parts)
        checked = time.perf_counter()
        self._counters.add(check_s=checked - started)
        with explain_failures(chunk.shard.key, "opened", chunk.offset):
            if fetched.bytes_on_disk is not None:
                block = self._open_onto_disk(chunk, fetched, fetched.bytes_on_disk)
            else:
                block = self._open(index, chunk, fetched)
            self._counters.add(open_s=time.perf_counter() - checked)
        if block.samples != chunk.samples:
            raise FormatError(
                chunk.shard.key,
                f"holds {block.samples} samples where the manifest says {chunk.samples}; "
                "rebuild the manifest with `penstock index`",
                offset=chunk.offset,
            )
        if fetched.mapped is not None:
            guarded = fetched.mapped.guard(chunk, block, fetched.parts[0])
            if guarded is None:  # and will be for the others
                self._mapped = None
                return self._open_fetched(index, chunk, self._fetch(chunk))
            block = guarded
        self._counters.add(fetched_chunks=1, fetched_bytes=sum(map(len, fetched.parts)))
        return block

    def _is_far(self, chunk: ChunkRef) -> bool:
        """Return whether a chunk that is wanted whole, and its shard's header, take a round trip each."""
        return (
            self._partitions.stored is None
            and self._has_headers
            and chunk.length + chunk.memory <= chunk.memory_limit
            and not self._headers.has(chunk.shard)
        )

    def _fetch_both(self, chunk: ChunkRef) -> tuple[Any, memoryview]:
        """A shard's header, fetched by a thread of its own, and meanwhile a chunk's bytes."""
        pool = DaemonPool(f"penstock-header {chunk.shard.key}", 1)
        header = pool.submit(self._headers.get, chunk.shard)
        pool.close(0)
        early = self._store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
        return header.result(), early

    def _open_onto_disk(self, chunk: ChunkRef, fetched: Fetched, needed: int) -> Block:
        """A chunk that memory cannot hold, of which only a few MiB are in memory at a time."""
        from .on_disk import join_on_disk

        rows = max(1, chunk.samples * _PIECE_BYTES // needed)
        stored, schema = self._partitions.stored, self._partitions.schema
        pieces = self._format.open_pieces(chunk, fetched.header, fetched.parts, stored, schema, rows)
        return join_on_disk((pack_records(self._complete(piece, chunk)) for piece in pieces), chunk, needed)

    def _open(self, index: int, chunk: ChunkRef, fetched: Fetched) -> Block:
        """Open a chunk as columns, by the layout of an earlier opening if it is known."""
        sums = self.manifest.checksums  # what was read was compared with them
        checksum = None if sums is None else int(sums[index])
        header, parts = fetched.header, fetched.parts
        is_whole = header is None and list(fetched.ranges) == [chunk.byte_range]
        block = self._layouts.find(index, parts[0], checksum) if is_whole else None
        if block is None:
            block = self._format.open_chunk(chunk, header, parts, self._partitions.stored, self._partitions.schema)
            if is_whole:
                check = None if fetched.mapped is None else partial(fetched.mapped.check, chunk)
                self._layouts.keep(index, block, parts[0], checksum, check=check)
            return pack_records(self._complete(block, chunk))
        return self._complete(block, chunk)

    def _complete(self, block: Block, chunk: ChunkRef) -> Block:
        """A block, or a piece of one, with what its bytes do not hold: columns in the path, and marks of nulls."""
        return add_marks(self._partitions.add_to(block, chunk), self._marked)

    def close(self) -> None:
        """Save the layouts of chunks for other processes of the node."""
        self._layouts.close()

    @property
    def header_bytes(self) -> int:
        """Bytes of the shards' headers, or of where values lie in chunks, that are kept, about."""
        return self._headers.nbytes + self._layouts.nbytes

    def limit_headers(self, budget_bytes: int) -> None:
        """Keep no more of the shards' headers than this, nor, where there are none, of the layouts of chunks."""
        self._headers.limit(budget_bytes)
        self._layouts.limit(budget_bytes)

    def limit_memory(self, limit_bytes: int) -> None:
        """Refuse a chunk that alone takes more than this, and more than 64 MiB, once opened."""
        self._memory_limit = max(limit_bytes, ALWAYS_BYTES)

    def limit_pages(self, nbytes: int) -> None:
        """Keep no more than this mapped of local files, but for chunks that are in use."""
        if self._mapped is not None:
            self._mapped.limit(nbytes)

    @property
    def mean_reserve(self) -> int:
        """Mean of ``reserve`` over the chunks, about."""
        return self._most_bytes // max(1, self.manifest.num_chunks)

    def fit_into(self, nbytes: int) -> bool:
        """Return whether all chunks fit into ``nbytes`` of memory, as far as is known before they are opened."""
        return self._most_bytes <= nbytes

    @property
    def _most_bytes(self) -> int:
        """Sum of ``reserve`` over all chunks, if none is too large for memory."""
        lengths, memory = self.manifest.lengths, self.manifest.memory
        return int(np.where(memory == lengths, lengths, lengths + memory).sum())

    def reserve(self, index: int) -> int:
        """Estimate the memory that a chunk may take while it is fetched and opened, in bytes."""
        if self._reads_nothing:
            return 0
        length, memory = int(self.manifest.lengths[index]), int(self.manifest.memory[index])
        most = length if memory == length else length + memory
        return min(most, self._memory_limit) if self._onto_disk else most

    def hold(self, index: int) -> int:
        """Bytes that a chunk counts for in read-ahead: on the disk, too, which has an end."""
        size = self.reserve(index)
        return size // _AHEAD_ON_DISK if self._onto_disk and size == self._memory_limit else size
