"""Opens the manifest of a source: read from beside the data or the node's cache, or built now from the shards."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...storage import Store, open_store
from ...storage.hashing import xxh3_64
from ...storage.threads.daemon_pool import DaemonPool
from ..errors import ConfigError
from ..formats.detect import make_format
from .build import INDEX_THREADS, PendingIndex, assemble, index_shards, prepare_index, warn_outdated
from .cache import IndexCache
from .class_names import warn_of_parts, with_names_of_parts
from .listing import warn_doubt
from .manifest import MANIFEST_NAME, Manifest
from .source import Source, select

if TYPE_CHECKING:
    from ..formats.shard import ShardFormat
    from .exchange import Exchange
    from .splits import Split


_MOST_BYTES = 64 << 20  # of several chunks


def is_copy(store: Store, manifest: Manifest) -> bool:
    """Return whether the shortest chunks of the first, middle and last shard have the manifest's checksums.

    If these are large, one is enough. All others are compared when they are read: a difference that is missed here is
    an error there.

    Raises:
        StorageError: a shard cannot be read.
    """
    assert manifest.checksums is not None
    places = sorted({0, len(manifest.shards) // 2, len(manifest.shards) - 1})
    chunks = [_shortest(manifest, place) for place in places]
    if manifest.lengths[chunks].sum() > _MOST_BYTES:
        chunks = chunks[:1]
    with DaemonPool("penstock-index", len(chunks)) as pool:
        return all(pool.map(lambda index: _is_same(store, manifest, index), chunks))


def _shortest(manifest: Manifest, place: int) -> int:
    """The shortest chunk of a shard."""
    first, stop = np.searchsorted(manifest.shard_index, [place, place + 1]).tolist()
    return int(first + manifest.lengths[first:stop].argmin())


def _is_same(store: Store, manifest: Manifest, index: int) -> bool:
    assert manifest.checksums is not None
    chunk = manifest.chunk(index)
    data = store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
    return xxh3_64(data) == int(manifest.checksums[index])


def open_manifest(
    source: Source | Manifest,
    *,
    split: Split | None = None,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    threads: int = INDEX_THREADS,
    rebuild: bool = False,
) -> Manifest:
    """The manifest of a data set, built if there is no matching one.

    ``source`` is the URL of a prefix, of one shard or of a saved manifest, a pattern, a list of these, a local path, or
    a Manifest, which is returned as is. Shards of a prefix or glob come in the order of their keys, others as given.
    ``split`` chooses the shards of a split, or of several in that order, by their names; "all" takes all of them, where
    a folder that mixes splits is refused otherwise. A split is the same data set as its folder, or a list of its
    shards, would be.
    ``rebuild`` ignores saved manifests. ``cache_dir`` is where manifests are kept on this node.
    A manifest that was copied with its shards is used if all of them have its names and sizes, and some chunks of them
    its checksums.

    In a process group of torch.distributed the first rank that calls this for a source builds, and the others get its
    manifest or its error through the group's key-value store; no collective is issued.

    Raises:
        DatasetError: nothing there, shards missing, mixed formats or splits, no samples; or the rank that builds died.
        FormatError: a shard that is not what its format says; names shard and offset.
        ConfigError: an unknown format or pattern, or token files without a sequence length.
        StorageError: the store refused or did not answer.
    """
    with ExitStack() as lingering:
        return find_manifest(
            source,
            lingering,
            split=split,
            storage_options=storage_options,
            format=format,
            cache_dir=cache_dir,
            progress=progress,
            threads=threads,
            rebuild=rebuild,
        )


def find_manifest(
    source: Source | Manifest,
    lingering: ExitStack,
    *,
    split: Split | None = None,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
    threads: int = INDEX_THREADS,
    rebuild: bool = False,
    trusts_copies: bool = True,
) -> Manifest:
    """Find a manifest as ``open_manifest`` does; ``lingering`` closes the store that it was found in.

    As long as that is open, a store of the data reuses its connections. Without ``trusts_copies``, shards that seem to
    be copies of those of the manifest beside them are indexed all the same.
    """
    if isinstance(format, type) or not (format is None or isinstance(format, str) or hasattr(format, "open_shard")):
        raise ConfigError(f"format={format!r}: give a format's name, or a format such as TokensFormat(seq_len=2048)")
    if isinstance(source, Manifest):
        refuse_of_manifest(source, split, format)
        return source
    if threads < 1:
        raise ConfigError(f"threads={threads}: needs 1 or more")
    if isinstance(source, (str, os.PathLike)):
        saved = _read_saved(source, lingering, storage_options)
        if saved is not None:
            refuse_of_manifest(saved, split, format)
            return saved
    given = make_format(format) if isinstance(format, str) else format
    cache = IndexCache(cache_dir)
    opening = _Opening(
        source, lingering, split, storage_options, given, cache, progress, threads, rebuild, trusts_copies
    )
    identity = repr(
        (source, *([] if split is None else [split]), given and (given.name, sorted(given.config().items())), rebuild)
    )
    if not _has_peers():
        return opening.alone()[0]
    from .exchange import join_exchange

    with join_exchange(identity) as exchange:
        return opening.shared(exchange)


def _has_peers() -> bool:
    """Return whether this process is in a process group of two or more ranks."""
    distributed = sys.modules.get("torch.distributed")  # imported by whoever initialised it
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return False
    return bool(distributed.get_world_size() > 1)


@dataclass(frozen=True, slots=True)
class _Opening:
    """One call of ``open_manifest``, with what it was given."""

    source: Source
    lingering: ExitStack
    split: Split | None
    storage_options: Mapping[str, Any] | None
    given: ShardFormat | None
    cache: IndexCache
    progress: bool
    threads: int
    rebuild: bool
    trusts_copies: bool

    def alone(self) -> tuple[Manifest, str | None]:
        """The manifest, and its key in the node's cache, or None if it is not kept there."""
        store, selection = select(self.source, self.storage_options, split=self.split, progress=self.progress)
        self.lingering.callback(store.close)
        prepared = prepare_index(store, selection, self.given, rebuild=self.rebuild)
        if isinstance(prepared, Manifest):
            warn_of_parts(prepared)
            return prepared.below(selection.root), None
        copied = prepared.copied if self.trusts_copies else None
        known_by = prepared.outdated if prepared.known else None
        key = self.cache.key(
            prepared.url,
            prepared.tasks,
            prepared.shard_format,
            outdated=known_by,
            copied=copied,
            classes=prepared.classes,
        )
        manifest = self._find(store, prepared, copied, key)
        if manifest.checksums is None:
            warn_outdated(prepared, manifest)
        warn_of_parts(manifest)
        return manifest.below(selection.root), key

    def _find(self, store: Store, pending: PendingIndex, copied: Manifest | None, key: str | None) -> Manifest:
        """Return the manifest that ``key`` names, from the node's cache or made now."""
        if key is None:
            return self._make(store, pending, copied)
        cached = self._cached(key, pending.url)
        if cached is not None:
            return cached
        with self.cache.lock(key):
            manifest = self._cached(key, pending.url)
            if manifest is None:
                manifest = self._make(store, pending, copied)
                self.cache.save(key, manifest)
        return manifest

    def shared(self, exchange: Exchange) -> Manifest:
        if exchange.builds:
            manifest, key = self.alone()
            notice = {"url": manifest.url, "key": key, "root": dict(manifest.root)}
            exchange.publish(notice, manifest.to_bytes())
            return manifest
        about = exchange.wait()
        key, url = about["key"], about["url"]
        if key is None:
            return Manifest.from_bytes(exchange.receive(), url)
        with self.cache.lock(f"{key}-copy"):  # one process of a node fetches it, the others find it there
            cached = self._cached(key, url)
            if cached is not None:
                return cached.below(about["root"])
            manifest = Manifest.from_bytes(exchange.receive(), url)
            self.cache.save(key, manifest)
            return manifest

    def _make(self, store: Store, pending: PendingIndex, copied: Manifest | None) -> Manifest:
        from ..progress import show_progress

        if copied is not None and is_copy(store, copied) and not self._has_samples(store, pending):
            return copied
        missing = pending.missing
        with show_progress("indexing", len(missing), unit="shards", enabled=self.progress) as advance:
            tasks = [pending.tasks[position] for position in missing]
            indexes = index_shards(store, pending.shard_format, tasks, threads=self.threads, advance=advance)
        doubts = [(task.info.key, index.doubt) for task, index in zip(tasks, indexes, strict=True) if index.doubt]
        if doubts:
            others = f"; {len(doubts) - 1:,} more of its shards have the same" if len(doubts) > 1 else ""
            warn_doubt(f"{pending.url}{doubts[0][0]}: {doubts[0][1]}{others}")
        return with_names_of_parts(store, assemble(pending, dict(zip(missing, indexes, strict=True))))

    def _has_samples(self, store: Store, pending: PendingIndex) -> bool:
        """Return whether shards that the manifest beside the data does not know hold samples; it leaves out others."""
        found = index_shards(store, pending.shard_format, pending.strangers, threads=self.threads)
        return any(index.chunks for index in found)

    def _cached(self, key: str, url: str) -> Manifest | None:
        return None if self.rebuild else self.cache.load(key, url)


def refuse_of_manifest(source: Source | Manifest, split: Split | None, form: ShardFormat | str | None) -> None:
    """Raise ConfigError if a split of a manifest, or another format, is asked for: it is one list of chunks already."""
    if not isinstance(source, Manifest):
        return
    if split is not None:
        raise ConfigError(f"split={split!r} of a manifest: give the URL of the folder instead, {source.url}")
    if form is None:
        return
    known = source.format, dict(source.config)
    asked = (form, known[1]) if isinstance(form, str) else (form.name, form.config())
    if asked != known:
        raise ConfigError(
            f"format={form!r} of a manifest of format {known[0]!r} with {known[1]}: leave it out, or give the URL of "
            f"the folder instead, {source.url}"
        )


def read_saved_manifest(
    source: str | os.PathLike[str], storage_options: Mapping[str, Any] | None = None
) -> Manifest | None:
    """The saved manifest if a source is the URL of one, else None."""
    with ExitStack() as lingering:
        return _read_saved(source, lingering, storage_options)


def _read_saved(
    source: str | os.PathLike[str], lingering: ExitStack, storage_options: Mapping[str, Any] | None
) -> Manifest | None:
    url = os.fspath(source)
    if not url.endswith(f"/{MANIFEST_NAME}"):
        return None
    root = url.removesuffix(MANIFEST_NAME)
    store = open_store(root, storage_options=storage_options)
    lingering.callback(store.close)
    return Manifest.from_bytes(store.get(MANIFEST_NAME), root, url)
