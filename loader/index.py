"""From a source to its manifest: kept beside the data, kept on the node, or built now from the shards themselves."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ..storage import ObjectInfo, StorageError, Store, open_store
from .errors import ConfigError, DatasetError, FormatError
from .formats.detect import detect_format, make_format
from .formats.shard import ChunkSpan, ShardFormat, ShardIndex, ShardTask
from .index_cache import IndexCache
from .index_exchange import Exchange, join_exchange
from .manifest import MANIFEST_NAME, Manifest
from .progress import Advance, show_progress
from .source import UNFINISHED, Selection, Source, select

# Indexing mostly waits: against a server on this machine 4 to 64 do alike, against one far away more do better.
INDEX_THREADS = 32


class StaleManifestWarning(UserWarning):
    """The manifest beside the data does not fit the data any more; what changed was indexed anew."""


class UnfinishedDatasetError(DatasetError):
    """The data set is being written, or its writer was interrupted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingIndex:
    """An index to be built: ``tasks`` are all shards in order, ``known`` the index of those that did not change."""

    url: str
    shard_format: ShardFormat
    tasks: Sequence[ShardTask]
    known: Mapping[int, ShardIndex]
    schema: Mapping[str, Any] | None

    @property
    def missing(self) -> list[int]:
        return [position for position in range(len(self.tasks)) if position not in self.known]


def open_manifest(
    source: Source | Manifest,
    *,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    threads: int = INDEX_THREADS,
    rebuild: bool = False,
) -> Manifest:
    """The manifest of a data set, built where there is none that fits.

    ``source`` is the URL of a prefix, of one shard or of a saved manifest, a brace pattern, a list of these, a local
    path, or a Manifest, which is handed back. Shards of a prefix come in the order of their keys, others as given.
    ``rebuild`` ignores what is saved. ``cache_dir`` is where manifests are kept on this node.

    In a process group of torch.distributed the ranks that call this for the same source share the work through the
    group's key-value store, without collectives; an error on one of them is raised on all.

    Raises:
        DatasetError: nothing there, shards missing, mixed formats, no samples; or another rank died.
        FormatError: a shard that is not what its format says; names shard and offset.
        ConfigError: an unknown format or pattern, or token files without a sequence length.
        StorageError: the store refused or did not answer.
    """
    if isinstance(source, Manifest):
        return source
    if threads < 1:
        raise ConfigError(f"threads={threads}: needs 1 or more")
    if isinstance(source, (str, os.PathLike)):
        saved = read_saved_manifest(source, storage_options)
        if saved is not None:
            return saved
    given = make_format(format) if isinstance(format, str) else format
    opening = _Opening(source, storage_options, given, IndexCache(cache_dir), progress, threads, rebuild)
    identity = repr((source, given and (given.name, sorted(given.config().items())), rebuild))
    exchange = join_exchange(identity)
    if exchange is None:
        return opening.alone()
    with exchange:
        return opening.shared(exchange)


@dataclass(frozen=True, slots=True)
class _Opening:
    """One call of ``open_manifest``, with what it was given."""

    source: Source
    storage_options: Mapping[str, Any] | None
    given: ShardFormat | None
    cache: IndexCache
    progress: bool
    threads: int
    rebuild: bool

    def alone(self) -> Manifest:
        store, selection = select(self.source, self.storage_options)
        try:
            prepared = prepare_index(store, selection, self.given, rebuild=self.rebuild)
            if isinstance(prepared, Manifest):
                return prepared
            key = self._cache_key(prepared)
            if key is None:
                return self._build(store, prepared)
            cached = self._cached(key, prepared.url)
            if cached is not None:
                return cached
            with self.cache.lock(key):
                cached = self._cached(key, prepared.url)
                if cached is not None:
                    return cached
                manifest = self._build(store, prepared)
                self.cache.save(key, manifest)
                return manifest
        finally:
            store.close()

    def shared(self, exchange: Exchange) -> Manifest:
        if exchange.leads:
            return self._lead(exchange)
        plan = exchange.receive_json("plan")
        if plan["missing"]:
            self._follow(exchange, plan)
        key, url = plan["key"], plan["url"]
        if key is None:
            return Manifest.from_bytes(exchange.receive("manifest"), url)
        exchange.wait_for("manifest")
        with self.cache.lock(f"{key}-copy"):  # one process of a node fetches it, the others find it
            manifest = self.cache.load(key, url)
            if manifest is None:
                manifest = Manifest.from_bytes(exchange.receive("manifest"), url)
                self.cache.save(key, manifest)
        return manifest

    def _lead(self, exchange: Exchange) -> Manifest:
        store, selection = select(self.source, self.storage_options)
        try:
            prepared = prepare_index(store, selection, self.given, rebuild=self.rebuild)
            key = None
            ready = prepared if isinstance(prepared, Manifest) else None
            if isinstance(prepared, PendingIndex):
                key = self._cache_key(prepared)
                ready = self._cached(key, prepared.url) if key else None
            if ready is not None:
                exchange.publish_json("plan", {"url": ready.url, "key": key, "missing": []})
                exchange.publish("manifest", ready.to_bytes())
                return ready
            assert isinstance(prepared, PendingIndex)
            plan = _describe(prepared, selection, key, exchange.part_size(len(prepared.missing)))
            exchange.publish_json("plan", plan)
            with self._bar(len(plan["missing"])) as advance:
                parts = _parts(plan)
                self._work(exchange, store, prepared, parts, advance)
                found: dict[int, ShardIndex] = {}
                for number, part in enumerate(parts):
                    found.update(zip(part, exchange.receive_indexes(number), strict=True))
            manifest = assemble(prepared, found, rebuilt=self.rebuild)
            if key is not None:
                self.cache.save(key, manifest)
            exchange.publish("manifest", manifest.to_bytes())
            return manifest
        finally:
            store.close()

    def _follow(self, exchange: Exchange, plan: Mapping[str, Any]) -> None:
        shard_format = make_format(plan["format"], plan["config"])
        selection = Selection(
            url=plan["url"],
            listing=tuple(ObjectInfo(*fields) for fields in plan["listing"]),
            chosen=None if plan["chosen"] is None else tuple(plan["chosen"]),
            named=frozenset(plan["named"]),
            saved=None,
        )
        store = open_store(selection.url, storage_options=self.storage_options)
        try:
            tasks = order_tasks(store, selection, shard_format)
            pending = PendingIndex(url=selection.url, shard_format=shard_format, tasks=tasks, known={}, schema=None)
            self._work(exchange, store, pending, _parts(plan), lambda count: None)
        finally:
            store.close()

    def _work(
        self, exchange: Exchange, store: Store, pending: PendingIndex, parts: Sequence[Sequence[int]], advance: Advance
    ) -> None:
        for number in exchange.claims(len(parts)):
            tasks = [pending.tasks[position] for position in parts[number]]
            exchange.doing(f"indexing shards {tasks[0].info.key} to {tasks[-1].info.key}")
            indexes = index_shards(store, pending.shard_format, tasks, threads=self.threads, advance=advance)
            exchange.publish_indexes(number, indexes)
        exchange.doing("waiting for the other ranks")

    def _build(self, store: Store, pending: PendingIndex) -> Manifest:
        missing = pending.missing
        with self._bar(len(missing)) as advance:
            tasks = [pending.tasks[position] for position in missing]
            indexes = index_shards(store, pending.shard_format, tasks, threads=self.threads, advance=advance)
        return assemble(pending, dict(zip(missing, indexes, strict=True)), rebuilt=self.rebuild)

    def _bar(self, shards: int) -> Any:
        return show_progress("indexing", shards, unit="shards", enabled=self.progress)

    def _cache_key(self, pending: PendingIndex) -> str | None:
        return self.cache.key(pending.url, [task.info for task in pending.tasks], pending.shard_format)

    def _cached(self, key: str, url: str) -> Manifest | None:
        return None if self.rebuild else self.cache.load(key, url)


def _describe(pending: PendingIndex, selection: Selection, key: str | None, part_size: int) -> dict[str, Any]:
    return {
        "url": pending.url,
        "key": key,
        "format": pending.shard_format.name,
        "config": pending.shard_format.config(),
        "listing": [(info.key, info.size, info.etag) for info in selection.listing],
        "chosen": selection.chosen,
        "named": sorted(selection.named),
        "missing": pending.missing,
        "part_size": part_size,
    }


def _parts(plan: Mapping[str, Any]) -> list[list[int]]:
    missing, size = plan["missing"], plan["part_size"]
    return [missing[start : start + size] for start in range(0, len(missing), size)]


def read_saved_manifest(
    source: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Manifest | None:
    """The saved manifest that a source is the URL of; None where it is the URL of something else."""
    url = os.fspath(source)
    if not url.endswith(f"/{MANIFEST_NAME}"):
        return None
    root = url.removesuffix(MANIFEST_NAME)
    store = open_store(root, storage_options=storage_options)
    try:
        return Manifest.from_bytes(store.get(MANIFEST_NAME), root, url)
    finally:
        store.close()


def prepare_index(
    store: Store, selection: Selection, given: ShardFormat | None, *, rebuild: bool = False
) -> PendingIndex | Manifest:
    """What is to be indexed of a selection; or its manifest, where the one beside the data covers it.

    Raises:
        DatasetError, ConfigError: no shards, mixed formats, or a named object that is no shard.
    """
    saved = None if rebuild else load_saved_manifest(store, selection, given)
    if saved is not None:
        shard_format = given or make_format(saved.format, saved.config)
    else:
        shard_format = given or detect_format(store, selection.listing)
    tasks = order_tasks(store, selection, shard_format)
    pending = PendingIndex(url=selection.url, shard_format=shard_format, tasks=tasks, known={}, schema=None)
    if saved is None:
        return pending
    places = {info.key: place for place, info in enumerate(saved.shards)}
    kept: dict[int, int] = {}
    for position, task in enumerate(tasks):
        place = places.get(task.info.key)
        if place is not None and same_object(saved.shards[place], task.info):
            kept[position] = place
    if len(kept) == len(tasks):
        if selection.chosen is None and len(kept) < len(saved.shards):
            _warn_stale(selection.url, new=0, gone=len(saved.shards) - len(kept))
        return take_shards(saved, [kept[position] for position in range(len(tasks))])
    indexes = _shard_indexes(saved)
    return replace(pending, known={position: indexes[place] for position, place in kept.items()}, schema=saved.schema)


def load_saved_manifest(store: Store, selection: Selection, given: ShardFormat | None) -> Manifest | None:
    """The manifest beside the data, where there is one of that format; a damaged one is told of and passed over.

    Raises:
        UnfinishedDatasetError: the data set is not written to its end.
    """
    if selection.saved is None:
        return None
    try:
        data = store.get(MANIFEST_NAME)
        if data == UNFINISHED and selection.chosen is None:
            raise UnfinishedDatasetError(
                f"{store.url}: its packing is under way or was interrupted; wait for it, or run `penstock pack` again"
            )
        saved = Manifest.from_bytes(data, selection.url, f"{store.url}/{MANIFEST_NAME}")
    except UnfinishedDatasetError:
        raise
    except (DatasetError, StorageError) as exc:
        warnings.warn(f"the manifest beside the data is not used: {exc}", StaleManifestWarning, stacklevel=2)
        return None
    if given is not None and (given.name, given.config()) != (saved.format, dict(saved.config)):
        return None
    return saved


def same_object(one: ObjectInfo, other: ObjectInfo) -> bool:
    """Whether two sights of a key are of one content, as far as its size and ETag tell."""
    return one.size == other.size and (one.etag == other.etag or one.etag is None or other.etag is None)


def _warn_stale(url: str, *, new: int, gone: int) -> None:
    changes = " and ".join(
        text for count, text in ((new, f"{new} new or changed shards"), (gone, f"{gone} gone")) if count
    )
    warnings.warn(
        f"the manifest beside {url} is out of date: {changes}; it was mended for this run, "
        f"`penstock index {url}` mends it for all",
        StaleManifestWarning,
        stacklevel=2,
    )


def order_tasks(store: Store, selection: Selection, shard_format: ShardFormat) -> list[ShardTask]:
    """The shards of a selection, in the order that they are to be read in."""
    found = shard_format.shards(store, selection.listing)
    if selection.chosen is None:
        tasks = list(found)
    else:
        by_key = {task.info.key: task for task in found}
        infos = {info.key: info for info in selection.listing}
        tasks = []
        for key in selection.chosen:
            task = by_key.get(key)
            if task is None and key in selection.named:
                # The caller named it: a name without an ending is taken at its word, another format's is not.
                if "." in key.rpartition("/")[2]:
                    raise DatasetError(
                        f"{selection.url}{key}: not a shard of format {shard_format.name!r} by its name; "
                        "leave it out, or give format="
                    )
                task = ShardTask(infos[key])
            if task is not None:
                tasks.append(task)
    if not tasks and selection.chosen is None:
        tasks = [ShardTask(info) for info in selection.listing if "." not in info.key.rpartition("/")[2]]
    if not tasks:
        raise DatasetError(
            f"{store.url}: holds no {shard_format.name} shards among its {len(selection.listing)} objects"
        )
    return tasks


def index_one(store: Store, shard_format: ShardFormat, task: ShardTask) -> ShardIndex:
    """Find the chunks of one shard.

    Raises:
        FormatError: the shard cannot be indexed, or has no bytes.
    """
    if task.info.size == 0:
        raise FormatError(task.info.key, "the shard is empty (0 bytes); write it again or remove it")
    return shard_format.index_shard(store, task)


def index_shards(
    store: Store,
    shard_format: ShardFormat,
    tasks: Sequence[ShardTask],
    *,
    threads: int = INDEX_THREADS,
    advance: Callable[[int], None] = lambda count: None,
) -> list[ShardIndex]:
    """Find the chunks of shards, ``threads`` at a time; the first error ends it.

    Raises:
        FormatError: a shard that cannot be indexed, or that has no bytes.
    """

    def index_next(task: ShardTask) -> ShardIndex:
        index = index_one(store, shard_format, task)
        advance(1)
        return index

    pool = ThreadPoolExecutor(min(threads, max(1, len(tasks))), "penstock-index")
    patient = True
    try:
        futures = [pool.submit(index_next, task) for task in tasks]
        wait(futures, return_when=FIRST_EXCEPTION)
        failed = next((future for future in futures if future.done() and future.exception()), None)
        return [failed.result()] if failed is not None else [future.result() for future in futures]
    except KeyboardInterrupt:
        patient = False  # a request may still be retried for a while
        raise
    finally:
        pool.shutdown(wait=patient, cancel_futures=True)


def assemble(pending: PendingIndex, found: Mapping[int, ShardIndex], *, rebuilt: bool = False) -> Manifest:
    """Put known and found indexes together, in the order of the tasks.

    Raises:
        FormatError: two shards contradict each other in schema.
        DatasetError: no shard holds a sample.
    """
    schema = pending.schema
    shards: list[tuple[ObjectInfo, ShardIndex]] = []
    fresh = 0
    for position, task in enumerate(pending.tasks):
        index = pending.known.get(position)
        if index is None:
            index = found[position]
            if index.chunks:
                fresh += 1
                if schema is None:
                    schema = index.schema
                elif index.schema != schema:
                    schema = pending.shard_format.merge_schema(schema, index.schema, task.info.key)
        shards.append((task.info, index))
    if pending.known and fresh and not rebuilt:
        _warn_stale(pending.url, new=fresh, gone=0)
    return Manifest.build(pending.url, pending.shard_format.name, pending.shard_format.config(), schema or {}, shards)


def take_shards(manifest: Manifest, places: Sequence[int]) -> Manifest:
    """The manifest of some shards of another, in the order of ``places``."""
    if list(places) == list(range(len(manifest.shards))):
        return manifest
    counts = np.bincount(manifest.shard_index, minlength=len(manifest.shards))
    firsts = np.cumsum(counts) - counts
    chunks = np.concatenate([np.arange(firsts[place], firsts[place] + counts[place]) for place in places])
    return replace(
        manifest,
        shards=tuple(manifest.shards[place] for place in places),
        shard_index=np.repeat(np.arange(len(places), dtype=np.int64), counts[list(places)]),
        offsets=manifest.offsets[chunks],
        lengths=manifest.lengths[chunks],
        samples=manifest.samples[chunks],
        memory=manifest.memory[chunks],
        checksums=None if manifest.checksums is None else manifest.checksums[chunks],
    )


def _shard_indexes(manifest: Manifest) -> list[ShardIndex]:
    rows = zip(
        manifest.offsets.tolist(),
        manifest.lengths.tolist(),
        manifest.samples.tolist(),
        manifest.memory.tolist(),
        strict=True,
    )
    chunks: list[list[ChunkSpan]] = [[] for _ in manifest.shards]
    for place, row in zip(manifest.shard_index.tolist(), rows, strict=True):
        chunks[place].append(ChunkSpan(*row))
    return [ShardIndex(spans, manifest.schema) for spans in chunks]
