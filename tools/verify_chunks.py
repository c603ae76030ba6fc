"""Reading every chunk of a data set: each is fetched, compared with its checksum, opened and counted."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue

import numpy as np
import pyarrow as pa

from ..loader.columns import Block, BytesColumn, ObjectColumn
from ..loader.counters import Counters
from ..loader.dataset.manifest import Manifest
from ..loader.errors import DecodeError, FormatError
from ..loader.formats.detect import make_format
from ..loader.formats.shard import ChunkRef, ShardFormat
from ..loader.limits import usable_memory
from ..loader.progress import show_progress
from ..loader.reading.checksum import read_chunk
from ..loader.reading.layouts import HeaderCache
from ..storage import Store
from ..storage.threads.daemon_pool import DaemonPool

_HEADER_BYTES = 128 << 20
_DECODED_AT_ONCE = 256  # values


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """Flaw of a shard. ``offset`` and ``length`` are those of the chunk, None for the shard as a whole."""

    shard: str
    offset: int | None
    length: int | None
    kind: str
    problem: str


def shard_flaw(shard: str, kind: str, problem: str) -> Flaw:
    return Flaw(shard=shard, offset=None, length=None, kind=kind, problem=problem)


def error_flaw(shard: str, error: BaseException, chunk: ChunkRef | None = None) -> Flaw:
    """The flaw that an error tells of; in ``chunk``, if one is given."""
    problem = error.problem if isinstance(error, FormatError) else str(error)
    offset = error.offset if isinstance(error, FormatError) else None
    if offset is None and chunk is not None:
        offset = chunk.offset
    return Flaw(
        shard=shard,
        offset=offset,
        length=chunk.length if chunk else None,
        kind=type(error).__name__,
        problem=problem or type(error).__name__,
    )


def check_chunks(store: Store, manifest: Manifest, threads: int, progress: bool, flaws: list[Flaw]) -> None:
    """Check all chunks but those of shards that are known to be bad, and append what is wrong to ``flaws``."""
    shard_format = make_format(manifest.format, manifest.config)
    skipped = {flaw.shard for flaw in flaws if flaw.offset is None}
    headers = HeaderCache(shard_format, store, Counters(), budget_bytes=_HEADER_BYTES)
    with (
        show_progress("verifying", manifest.num_bytes, unit="B", enabled=progress) as advance,
        DaemonPool("penstock-verify", threads) as pool,
    ):
        running: dict[Future[Flaw | None], int] = {}
        ended: SimpleQueue[Future[Flaw | None]] = SimpleQueue()
        waiting = iter(range(manifest.num_chunks))
        exhausted = False
        while running or not exhausted:
            # A few chunks ahead of the threads, not all of them: a data set may have a million.
            while not exhausted and len(running) < 4 * threads:
                index = next(waiting, None)
                if index is None:
                    exhausted = True
                elif manifest.shards[int(manifest.shard_index[index])].key not in skipped:
                    begun = pool.submit(_check_chunk, store, manifest, shard_format, headers, index)
                    running[begun] = index
                    begun.add_done_callback(ended.put)
            if running:
                done = ended.get()
                chunk = manifest.chunk(running.pop(done))
                problem = done.result()
                if problem is not None:
                    flaws.append(problem)
                advance(chunk.length)


def _check_chunk(
    store: Store, manifest: Manifest, shard_format: ShardFormat, headers: HeaderCache, index: int
) -> Flaw | None:
    chunk = manifest.chunk(index, usable_memory())
    try:
        checksum = None if manifest.checksums is None else int(manifest.checksums[index])
        block = read_chunk(store, shard_format, headers.get(chunk.shard), chunk, manifest.schema, checksum=checksum)
        _touch_values(block, chunk)
        if block.samples != chunk.samples:
            raise FormatError(
                chunk.shard.key,
                f"the chunk holds {block.samples} samples, the manifest says {chunk.samples}",
                offset=chunk.offset,
            )
    except Exception as exc:  # noqa: BLE001 - whatever a shard's bytes do to its reader is a flaw of theirs to report
        return error_flaw(chunk.shard.key, exc, chunk)
    return None


def _touch_values(block: Block, chunk: ChunkRef) -> None:
    """Check what opening a chunk defers: decode text and what is kept encoded, validate Arrow arrays in full."""
    for name, column in block.columns.items():
        try:
            if isinstance(column, ObjectColumn):
                pieces = getattr(column, "pieces", None)
                for array in pieces or (column.values,):
                    array.validate(full=True)
                if pieces is None and type(column) is not ObjectColumn:  # values are kept encoded
                    for first in range(0, column.num_rows, _DECODED_AT_ONCE):
                        column.take(np.arange(first, min(first + _DECODED_AT_ONCE, column.num_rows)))
            elif isinstance(column, BytesColumn) and column.text:
                for start, stop in zip(column.starts.tolist(), column.stops.tolist(), strict=True):
                    if start >= 0:
                        str(column.buffer[start:stop], "utf-8")
        except (pa.ArrowException, UnicodeDecodeError, DecodeError) as exc:
            raise FormatError(chunk.shard.key, f"column {name!r}: {exc}", offset=chunk.offset) from exc
