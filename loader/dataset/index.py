"""From a source to its manifest: kept beside the data, kept on the node, or built now from the shards themselves."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...storage import ObjectInfo, Store, open_store
from ..errors import ConfigError
from ..formats.detect import make_format
from ..formats.shard import ShardFormat, ShardIndex
from ..progress import Advance, show_progress
from .build import (
    INDEX_THREADS,
    PendingIndex,
    assemble,
    index_shards,
    order_tasks,
    prepare_index,
)
from .cache import IndexCache
from .exchange import Exchange, join_exchange
from .manifest import MANIFEST_NAME, Manifest
from .source import Selection, Source, select


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
        store, selection = select(self.source, self.storage_options, progress=self.progress)
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
        store, selection = select(self.source, self.storage_options, progress=self.progress)
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
