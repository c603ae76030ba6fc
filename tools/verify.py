"""Checking a whole data set: its shards against its manifest, and every chunk."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..loader.dataset.build import (
    PendingIndex,
    assemble,
    heed_shards,
    index_one,
    load_saved_manifest,
    prepare_index,
    same_object,
)
from ..loader.dataset.index import read_saved_manifest, refuse_of_manifest
from ..loader.dataset.manifest import Manifest
from ..loader.dataset.source import Selection, Source, refuse_mixed, select
from ..loader.dataset.splits import Split
from ..loader.errors import ConfigError, DatasetError, FormatError
from ..loader.formats.detect import make_format
from ..loader.formats.schema import find_missing
from ..loader.formats.shard import ShardFormat, ShardTask
from ..loader.progress import show_progress
from ..loader.reading.checksum import READ_THREADS
from ..storage import ObjectInfo, PenstockError, Store, open_store
from ..storage.threads.daemon_pool import DaemonPool
from .verify_chunks import Flaw, check_chunks, error_flaw, shard_flaw


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyResult:
    """Result of ``verify``. ``checksums``: whether the manifest had checksums to compare."""

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
        """Return whether no flaw was found."""
        return not self.flaws

    @property
    def bad_shards(self) -> tuple[str, ...]:
        """The keys of the shards that have flaws, sorted."""
        return tuple(sorted({flaw.shard for flaw in self.flaws}))


def verify(
    source: Source | Manifest,
    *,
    split: Split | None = None,
    storage_options: Mapping[str, Any] | None = None,
    format: ShardFormat | str | None = None,  # noqa: A002 - the word that users know
    threads: int = READ_THREADS,
    progress: bool = True,
) -> VerifyResult:
    """Read and check every chunk of a data set; flaws are collected, not raised.

    ``split`` chooses a split's shards, as the loader does. A manifest beside the data is the reference: shards that
    differ from it, are missing, or are not listed in it are flaws. Without a manifest the shards are indexed first, and
    a shard that cannot be indexed is a flaw.

    Raises:
        DatasetError, ConfigError, StorageError: there is no data set to check.
    """
    if threads < 1:
        raise ConfigError(f"threads={threads}: needs 1 or more")
    started = time.monotonic()
    flaws: list[Flaw] = []
    doubts: list[Flaw] = []  # of what can be read
    if isinstance(source, (str, os.PathLike)):
        saved = read_saved_manifest(source, storage_options)
        source = source if saved is None else saved
    refuse_of_manifest(source, split, format)
    if isinstance(source, Manifest):
        store: Store = open_store(source.url, storage_options=storage_options)
        manifest: Manifest | None = source
    else:
        store, selection = select(source, storage_options, split=split, progress=progress)
        given = make_format(format) if isinstance(format, str) else format
    try:
        if not isinstance(source, Manifest):
            manifest = _find_manifest(store, selection, given, threads, progress, flaws, doubts)
            manifest = None if manifest is None else manifest.below(selection.root)
        if manifest is not None:
            flaws += [error_flaw(exc.shard, exc) for exc in find_missing(manifest.schema)]
        if manifest is not None:
            check_chunks(store, manifest, threads, progress, flaws)
        bad = {flaw.shard for flaw in flaws}
        flaws += [doubt for doubt in doubts if doubt.shard not in bad]
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
    store: Store,
    selection: Selection,
    given: ShardFormat | None,
    threads: int,
    progress: bool,
    flaws: list[Flaw],
    doubts: list[Flaw],
) -> Manifest | None:
    def tell(text: str) -> None:
        doubts.append(shard_flaw(selection.url, "Doubtful", text))

    saved = load_saved_manifest(store, selection, given)
    if saved is not None and selection.chosen is None:
        shard_format = given or make_format(saved.format, saved.config)
        shards = [shard.key for shard in saved.shards]
        refuse_mixed(store, selection, shards)
        heed_shards(selection, shards, shard_format, tell)
        flaws += _compare_listing(saved, selection.listing, shard_format, store)
        _doubt_shards(store, saved, shard_format, threads, flaws, doubts)
        there = {info.key: info for info in selection.listing}
        # A copy of a data set has other ETags: read it by those, and let the checksums tell whether it is the same.
        return replace(saved, shards=tuple(there.get(shard.key, shard) for shard in saved.shards))
    prepared = prepare_index(store, selection, given, tell=tell)
    if isinstance(prepared, Manifest):
        return prepared
    if prepared.copied is not None and not prepared.strangers:  # as above
        return prepared.copied
    return _index_tolerantly(store, prepared, threads, progress, flaws, doubts)


def _doubt_shards(
    store: Store,
    saved: Manifest,
    shard_format: ShardFormat,
    threads: int,
    flaws: list[Flaw],
    doubts: list[Flaw],
) -> None:
    """Find what indexing tells of shards that are indexed already: only of archives it tells more than reading them."""
    if saved.format != "tar":
        return
    bad = {flaw.shard for flaw in flaws}
    with DaemonPool("penstock-verify", threads) as pool:
        shards = [shard for shard in saved.shards if shard.key not in bad]
        futures = [
            pool.submit(index_one, store, shard_format, ShardTask(replace(shard, etag=None))) for shard in shards
        ]
        for shard, future in zip(shards, futures, strict=True):
            try:
                if doubt := future.result().doubt:
                    doubts.append(shard_flaw(shard.key, "Doubtful", doubt))
            except PenstockError as exc:
                doubts.append(error_flaw(shard.key, exc))


def _compare_listing(
    saved: Manifest, listing: Sequence[ObjectInfo], shard_format: ShardFormat, store: Store
) -> list[Flaw]:
    there = {info.key: info for info in listing}
    flaws = []
    for shard in saved.shards:
        info = there.get(shard.key)
        if info is None:
            flaws.append(shard_flaw(shard.key, "NotFoundError", "is in the manifest but missing"))
        elif info.size != shard.size:
            problem = f"has {info.size} bytes, the manifest says {shard.size}"
            flaws.append(shard_flaw(shard.key, "ObjectChangedError", problem))
        elif saved.checksums is None and not same_object(info, shard):
            problem = f"has ETag {info.etag}, the manifest says {shard.etag} and has no checksums to compare"
            flaws.append(shard_flaw(shard.key, "ObjectChangedError", problem))
    known = {shard.key for shard in saved.shards}
    for task in shard_format.shards(store, listing):
        if task.info.key in known:
            companion, indexed = task.companion, saved.companions.get(task.info.key)
            if companion is not None and (indexed is None or indexed.size != companion.size):
                problem = f"is read by {companion.key}, which came or changed since; run `penstock index`"
                flaws.append(shard_flaw(task.info.key, "ObjectChangedError", problem))
            continue
        try:
            samples = sum(span.samples for span in index_one(store, shard_format, task).chunks)
        except PenstockError as exc:
            flaws.append(error_flaw(task.info.key, exc))
            continue
        if samples:
            problem = f"has {samples} samples but is not in the manifest; run `penstock index`"
            flaws.append(shard_flaw(task.info.key, "Unlisted", problem))
    return flaws


def _index_tolerantly(
    store: Store, pending: PendingIndex, threads: int, progress: bool, flaws: list[Flaw], doubts: list[Flaw]
) -> Manifest | None:
    """Index the shards; one that cannot be indexed is a flaw and is skipped."""
    found = {}
    with (
        show_progress("indexing", len(pending.missing), unit="shards", enabled=progress) as advance,
        DaemonPool("penstock-verify", threads) as pool,
    ):
        futures = {
            position: pool.submit(index_one, store, pending.shard_format, pending.tasks[position])
            for position in pending.missing
        }
        for position, future in futures.items():
            key = pending.tasks[position].info.key
            try:
                found[position] = future.result()
                if doubt := found[position].doubt:
                    doubts.append(shard_flaw(key, "Doubtful", doubt))
            except PenstockError as exc:
                flaws.append(error_flaw(key, exc))
            advance(1)
    good = [place for place in range(len(pending.tasks)) if place in found or place in pending.known]
    whole = PendingIndex(
        url=pending.url,
        shard_format=pending.shard_format,
        tasks=[pending.tasks[place] for place in good],
        known={number: pending.known[place] for number, place in enumerate(good) if place in pending.known},
        schema=pending.schema,
        outdated=pending.outdated,
    )
    try:
        return assemble(whole, {number: found[place] for number, place in enumerate(good) if place in found})
    except FormatError as exc:
        flaws.append(error_flaw(exc.shard, exc))
    except DatasetError:
        if not flaws:
            raise
    return None
