"""Reading all of a data set to see whether it is whole: every chunk is fetched, summed, opened and counted."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from ...storage import ObjectInfo, PenstockError, Store, open_store
from ..columns import Block, BytesColumn, ObjectColumn
from ..dataset.build import (
    PendingIndex,
    assemble,
    index_one,
    load_saved_manifest,
    prepare_index,
    same_object,
)
from ..dataset.index import read_saved_manifest
from ..dataset.manifest import Manifest
from ..dataset.source import Selection, Source, select
from ..errors import ConfigError, DatasetError, FormatError
from ..formats.detect import make_format
from ..formats.shard import ChunkRef, ShardFormat
from ..progress import show_progress
from ..reading.checksum import READ_THREADS, read_chunk


@dataclass(frozen=True, slots=True, kw_only=True)
class Flaw:
    """What is wrong with a shard: where (None: the shard as a whole), what kind of error, and in words."""

    shard: str
    offset: int | None
    length: int | None
    kind: str
    problem: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """What ``verify`` read and what it found; ``checksums`` says whether the manifest had some to compare."""

    url: str
    format: str
    shards: int
    chunks: int
    samples: int
    bytes: int
    seconds: float
    checksums: bool
    flaws: tuple[Flaw, ...]

    @property
    def ok(self) -> bool:
        return not self.flaws

    @property
    def bad_shards(self) -> tuple[str, ...]:
        return tuple(sorted({flaw.shard for flaw in self.flaws}))


def verify(
    source: Source | Manifest,
    *,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    threads: int = READ_THREADS,
    progress: bool = True,
) -> VerifyResult:
    """Read and check every chunk of a data set; flaws are gathered, not raised.

    A manifest beside the data is taken at its word: shards that differ from it, are missing, or are not in it are
    flaws. Without one the shards are indexed first, and one that cannot be is a flaw.

    Raises:
        DatasetError, ConfigError, StorageError: there is no data set to check.
    """
    if threads < 1:
        raise ConfigError(f"threads={threads}: needs 1 or more")
    started = time.monotonic()
    flaws: list[Flaw] = []
    if isinstance(source, (str, os.PathLike)):
        saved = read_saved_manifest(source, storage_options)
        source = source if saved is None else saved
    if isinstance(source, Manifest):
        store: Store = open_store(source.url, storage_options=storage_options)
        manifest: Manifest | None = source
    else:
        store, selection = select(source, storage_options, progress=progress)
        given = make_format(format) if isinstance(format, str) else format
    try:
        if not isinstance(source, Manifest):
            manifest = _find_manifest(store, selection, given, threads, progress, flaws)
        if manifest is not None:
            _check_chunks(store, manifest, threads, progress, flaws)
    finally:
        store.close()
    order = {shard.key: place for place, shard in enumerate(manifest.shards)} if manifest else {}
    flaws.sort(key=lambda flaw: (order.get(flaw.shard, -1), flaw.shard, flaw.offset or 0))
    return VerifyResult(
        url=store.url,
        format=manifest.format if manifest else "?",
        shards=len(manifest.shards) if manifest else 0,
        chunks=manifest.num_chunks if manifest else 0,
        samples=manifest.num_samples if manifest else 0,
        bytes=manifest.num_bytes if manifest else 0,
        seconds=time.monotonic() - started,
        checksums=manifest is not None and manifest.checksums is not None,
        flaws=tuple(flaws),
    )


def _find_manifest(
    store: Store, selection: Selection, given: ShardFormat | None, threads: int, progress: bool, flaws: list[Flaw]
) -> Manifest | None:
    saved = load_saved_manifest(store, selection, given)
    if saved is not None and selection.chosen is None:
        flaws += _compare_listing(saved, selection.listing, given or make_format(saved.format, saved.config), store)
        there = {info.key: info for info in selection.listing}
        # A copy of a data set has ETags of its own: it is read by these, and the checksums tell whether it is the same.
        return replace(saved, shards=tuple(there.get(shard.key, shard) for shard in saved.shards))
    prepared = prepare_index(store, selection, given)
    if isinstance(prepared, Manifest):
        return prepared
    return _index_tolerantly(store, prepared, threads, progress, flaws)


def _compare_listing(
    saved: Manifest, listing: Sequence[ObjectInfo], shard_format: ShardFormat, store: Store
) -> list[Flaw]:
    there = {info.key: info for info in listing}
    flaws = []
    for shard in saved.shards:
        info = there.get(shard.key)
        if info is None:
            flaws.append(_flaw(shard.key, "NotFoundError", "is in the manifest, and gone"))
        elif info.size != shard.size:
            problem = f"has {info.size} bytes, the manifest says {shard.size}"
            flaws.append(_flaw(shard.key, "ObjectChangedError", problem))
        elif saved.checksums is None and not same_object(info, shard):
            problem = f"has ETag {info.etag}, the manifest says {shard.etag}, and has no checksums to compare"
            flaws.append(_flaw(shard.key, "ObjectChangedError", problem))
    known = {shard.key for shard in saved.shards}
    for task in shard_format.shards(store, listing):
        if task.info.key in known:
            continue
        try:
            samples = sum(span.samples for span in index_one(store, shard_format, task).chunks)
        except PenstockError as exc:
            flaws.append(_flaw_of(task.info.key, exc))
            continue
        if samples:
            problem = f"has {samples} samples and is not in the manifest; run `penstock index`"
            flaws.append(_flaw(task.info.key, "Unlisted", problem))
    return flaws


def _index_tolerantly(
    store: Store, pending: PendingIndex, threads: int, progress: bool, flaws: list[Flaw]
) -> Manifest | None:
    """Index what can be; a shard that cannot is a flaw and is left out."""
    found = {}
    with (
        show_progress("indexing", len(pending.missing), unit="shards", enabled=progress) as advance,
        ThreadPoolExecutor(threads, "penstock-verify") as pool,
    ):
        futures = {
            position: pool.submit(index_one, store, pending.shard_format, pending.tasks[position])
            for position in pending.missing
        }
        for position, future in futures.items():
            key = pending.tasks[position].info.key
            try:
                found[position] = future.result()
            except PenstockError as exc:
                flaws.append(_flaw_of(key, exc))
            advance(1)
    good = [place for place in range(len(pending.tasks)) if place in found or place in pending.known]
    whole = PendingIndex(
        url=pending.url,
        shard_format=pending.shard_format,
        tasks=[pending.tasks[place] for place in good],
        known={},
        schema=pending.schema,
    )
    indexes = {number: found.get(place) or pending.known[place] for number, place in enumerate(good)}
    try:
        return assemble(whole, indexes)
    except FormatError as exc:
        flaws.append(_flaw_of(exc.shard, exc))
    except DatasetError:
        if not flaws:
            raise
    return None


def _check_chunks(store: Store, manifest: Manifest, threads: int, progress: bool, flaws: list[Flaw]) -> None:
    shard_format = make_format(manifest.format, manifest.config)
    skipped = {flaw.shard for flaw in flaws if flaw.offset is None}
    headers = _Headers(store, shard_format)
    pool = ThreadPoolExecutor(threads, "penstock-verify")
    patient = True
    try:
        with show_progress("verifying", manifest.num_bytes, unit="B", enabled=progress) as advance:
            running: dict[Any, int] = {}
            waiting = iter(range(manifest.num_chunks))
            exhausted = False
            while running or not exhausted:
                # A few chunks ahead of the threads, not all of them: a data set may have a million.
                while not exhausted and len(running) < 4 * threads:
                    index = next(waiting, None)
                    if index is None:
                        exhausted = True
                    elif manifest.shards[int(manifest.shard_index[index])].key not in skipped:
                        running[pool.submit(_check_chunk, store, manifest, shard_format, headers, index)] = index
                done = wait(running, return_when=FIRST_COMPLETED).done if running else ()
                for future in done:
                    chunk = manifest.chunk(running.pop(future))
                    problem = future.result()
                    if problem is not None:
                        flaws.append(problem)
                    advance(chunk.length)
    except KeyboardInterrupt:
        patient = False
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=True)


class _Headers:
    """What a format needs of a shard to open its chunks, got once a shard; the lock guards the latest few."""

    def __init__(self, store: Store, shard_format: ShardFormat) -> None:
        self._store, self._format = store, shard_format
        self._lock = threading.Lock()
        self._kept: dict[str, Any] = {}

    def of(self, shard: ObjectInfo) -> Any:
        with self._lock:
            if shard.key in self._kept:
                return self._kept[shard.key]
        header = self._format.open_shard(self._store, shard)
        with self._lock:
            self._kept[shard.key] = header
            while len(self._kept) > 64:
                self._kept.pop(next(iter(self._kept)))
        return header


def _check_chunk(
    store: Store, manifest: Manifest, shard_format: ShardFormat, headers: _Headers, index: int
) -> Flaw | None:
    chunk = manifest.chunk(index)
    try:
        checksum = None if manifest.checksums is None else int(manifest.checksums[index])
        block = read_chunk(store, shard_format, headers.of(chunk.shard), chunk, manifest.schema, checksum=checksum)
        _touch_values(block, chunk)
        if block.samples != chunk.samples:
            raise FormatError(
                chunk.shard.key,
                f"the chunk holds {block.samples} samples, the manifest says {chunk.samples}",
                offset=chunk.offset,
            )
    except Exception as exc:  # noqa: BLE001 - whatever a shard's bytes do to its reader is a flaw of theirs to report
        return _flaw_of(chunk.shard.key, exc, chunk)
    return None


def _touch_values(block: Block, chunk: ChunkRef) -> None:
    """Look at what opening a chunk leaves for later: text is decoded, Arrow arrays are checked through."""
    for name, column in block.columns.items():
        try:
            if isinstance(column, ObjectColumn):
                column.values.validate(full=True)
            elif isinstance(column, BytesColumn) and column.text:
                for start, stop in zip(column.starts.tolist(), column.stops.tolist(), strict=True):
                    if start >= 0:
                        str(column.buffer[start:stop], "utf-8")
        except (pa.ArrowException, UnicodeDecodeError) as exc:
            raise FormatError(chunk.shard.key, f"column {name!r}: {exc}", offset=chunk.offset) from exc


def _flaw(shard: str, kind: str, problem: str) -> Flaw:
    return Flaw(shard=shard, offset=None, length=None, kind=kind, problem=problem)


def _flaw_of(shard: str, error: BaseException, chunk: ChunkRef | None = None) -> Flaw:
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
