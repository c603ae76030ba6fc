"""Builds an index: finds what is known and what is missing, reads the missing shards, assembles a manifest."""

from __future__ import annotations

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any

import numpy as np

from ...storage import DecryptionError, NotFoundError, ObjectInfo, StorageError, Store
from ...storage.threads.daemon_pool import DaemonPool
from ..errors import ConfigError, DatasetError, FormatError
from ..formats.detect import detect_format, encrypted_hint, format_by_name, make_format
from ..formats.hive import stored_schema
from ..formats.shard import (
    ChunkSpan,
    ShardFormat,
    ShardIndex,
    ShardTask,
    explain_failures,
    find_shards,
    has_suffix,
    is_text,
)
from ..formats.tokens import has_free_dtype, index_keys
from .listing import heed_names, warn_doubt
from .manifest import MANIFEST_NAME, Manifest
from .source import Selection, is_unfinished, refuse_mixed

# What lies at the root of each, by Delta's PROTOCOL.md, Iceberg's table spec and Hudi's technical specification.
_LOGS = (
    ("Delta Lake", "_delta_log/", re.compile(r"\d+\.(json|checkpoint\..*)")),
    ("Iceberg", "metadata/", re.compile(r"[^/]*\.metadata\.json")),
    ("Hudi", ".hoodie/", re.compile(r"hoodie\.properties")),
)


def refuse_logged(url: str, keys: Iterable[str], shards: Sequence[str]) -> None:
    """Raise DatasetError where ``shards`` would be all files of such a table, among all ``keys`` below ``url``.

    Files of earlier versions stay until they are cleaned up: rows that were deleted would be read, and changed ones
    twice.
    """
    for key in keys:
        for name, folder, log in _LOGS:
            if folder not in key:
                continue
            root, _, base = key.rpartition(folder)
            is_log = root[-1:] in ("", "/") and log.fullmatch(base) is not None
            if is_log and any(shard.startswith(root) for shard in shards):
                place = f"{url.rstrip('/')}/{root}"
                raise DatasetError(
                    f"{place}: is a table of {name}, whose log alone ({key}, ...) tells which of its files count; rows "
                    "that were deleted or changed would be read along. Give the files of the version that you want as "
                    "a list, or, where nothing was ever deleted or changed, all of them by the pattern "
                    f"{place}**/*.parquet"
                )


# Indexing mostly waits. Against a server on this machine 4 to 64 threads take about the same time; against one far away
# more are faster, up to the 64 requests that a store runs at once.
INDEX_THREADS = 64


class StaleManifestWarning(UserWarning):
    """The manifest beside the data no longer matches the data; what changed was indexed again."""


class UnfinishedDatasetError(DatasetError):
    """The data set is still being written, or its writer was interrupted: run the same ``penstock pack`` again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingIndex:
    """An index to build: ``tasks`` are all shards in order, ``known`` the indexes of those that did not change.

    ``outdated`` is the manifest beside the data, which does not match them. ``copied`` is what it says of these shards
    if they are copies of those that it was made of, as names and sizes allow; with checksums for all that is read. It
    holds if ``strangers``, the tasks that the manifest does not know, have no samples. ``classes`` are the names of
    classes that it has for these shards.
    """

    url: str
    shard_format: ShardFormat
    tasks: Sequence[ShardTask]
    known: Mapping[int, ShardIndex]
    schema: Mapping[str, Any] | None
    outdated: Manifest | None = None
    copied: Manifest | None = None
    classes: tuple[str, ...] | None = None

    @property
    def missing(self) -> list[int]:
        return [position for position in range(len(self.tasks)) if position not in self.known]

    @property
    def strangers(self) -> list[ShardTask]:
        there = set() if self.copied is None else {info.key for info in self.copied.shards}
        return [task for task in self.tasks if task.info.key not in there]


def prepare_index(
    store: Store,
    selection: Selection,
    given: ShardFormat | None,
    *,
    rebuild: bool = False,
    tell: Callable[[str], None] = warn_doubt,
) -> PendingIndex | Manifest:
    """Find the shards of a selection to index; return its manifest instead if the one beside the data covers it.

    ``tell`` is called with each warning that the names of shards give of missing ones.

    Raises:
        DatasetError, ConfigError: no shards, shards twice by their names, mixed formats or splits, or a named object
            that is no shard.
    """
    saved = None if rebuild else load_saved_manifest(store, selection, given)
    if saved is not None:
        shard_format = given or make_format(saved.format, saved.config)
    else:
        shard_format = given or detect_format(store, selection.listing, selection.spelled)
    tasks = order_tasks(store, selection, shard_format, is_given=given is not None)
    shards = [task.info.key for task in tasks]
    if shard_format.name == "parquet" and (selection.chosen is None or selection.folders):
        refuse_logged(selection.url, (info.key for info in selection.listing), shards)
    refuse_mixed(store, selection, shards)
    heed_shards(selection, shards, shard_format, tell)
    pending = PendingIndex(url=selection.url, shard_format=shard_format, tasks=tasks, known={}, schema=None)
    if saved is None:
        return pending
    places = {info.key: place for place, info in enumerate(saved.shards)}
    alike: dict[int, int] = {}  # for each task as far as they go: its place among the saved shards
    strangers = 0
    kept: dict[int, int] = {}
    for position, task in enumerate(tasks):
        place = places.get(task.info.key)
        if place is None:
            strangers += 1
            continue
        if saved.shards[place].size != task.info.size:
            continue
        before, companion = saved.companions.get(task.info.key), task.companion
        if companion is not None and (before is None or before.size != companion.size):
            continue  # what says how it is read came, or changed, since; of one that is gone the manifest knows
        alike[position] = place
        is_same = companion is None or before is None or same_object(before, companion)
        if is_same and same_object(saved.shards[place], task.info):
            kept[position] = place
    if len(kept) == len(tasks):
        if selection.chosen is None and len(kept) < len(saved.shards):
            _warn_stale(selection.url, new=0, gone=len(saved.shards) - len(kept))
        return _without_etags(take_shards(saved, list(alike.values())), tasks)
    copied: Manifest | None = None
    if not kept and alike and len(alike) + strangers == len(tasks) and saved.checks_all:
        copied = replace(
            take_shards(saved, list(alike.values())), shards=tuple(tasks[position].info for position in alike)
        )
    indexes = shard_indexes(saved)
    known = {position: indexes[place] for position, place in kept.items()}
    # Of a data set that was written anew the old fields are none.
    schema = stored_schema(saved.schema) if known else None
    classes = saved.classes if known or len(alike) == len(tasks) else None
    return replace(pending, known=known, schema=schema, outdated=saved, copied=copied, classes=classes)


def heed_shards(
    selection: Selection, shards: Sequence[str], shard_format: ShardFormat, tell: Callable[[str], None]
) -> None:
    """Refuse shards that come twice, and ``tell`` of missing ones, by the names of a selection's shards.

    Raises:
        DatasetError: shards would come twice.
    """
    unnamed = [key for key in shards if key not in selection.named]
    suffixes = (*shard_format.suffixes, *shard_format.other_suffixes)
    heed_names(selection.url, unnamed, suffixes, tell, globs=selection.globs)


def load_saved_manifest(store: Store, selection: Selection, given: ShardFormat | None) -> Manifest | None:
    """The manifest beside the data, if there is one of that format; warns about a damaged one and ignores it.

    Raises:
        UnfinishedDatasetError: the data set is not completely written.
        DecryptionError: it is encrypted, and was changed or exchanged, or the key is another one.
        ConfigError: it says that tokens are of another type than ``given`` does.
    """
    if selection.saved is None:
        return None
    try:
        data = store.get(MANIFEST_NAME) if selection.saved_data is None else selection.saved_data.result()
        if is_unfinished(data) and selection.chosen is None:
            raise UnfinishedDatasetError(
                f"{store.url}: it is still being packed, or packing was interrupted; wait, or run `penstock pack` again"
            )
        saved = Manifest.from_bytes(data, selection.url, f"{store.url}/{MANIFEST_NAME}")
    except (UnfinishedDatasetError, DecryptionError):
        raise
    except (DatasetError, StorageError) as exc:
        warnings.warn(f"the manifest beside the data is not used: {exc}", StaleManifestWarning, stacklevel=2)
        return None
    if given is not None and (given.name, given.config()) != (saved.format, dict(saved.config)):
        _refuse_other_tokens(selection, given, saved)
        # Tokens are read in other lengths than they are packed in, as a matter of course.
        if saved.checksums is not None and not {given.name, saved.format} <= {"tokens", "token_documents"}:
            warnings.warn(
                f"the manifest beside {selection.url} is of format {_show_format(saved.format, saved.config)}, and the "
                f"shards are read as {_show_format(given.name, given.config())}: this run indexes them itself and "
                "compares no checksums; run `penstock index` with that format to index them for all runs",
                StaleManifestWarning,
                stacklevel=2,
            )
        return None
    return saved


def _show_format(name: str, config: Mapping[str, Any]) -> str:
    settings = ", ".join(f"{key}={value!r}" for key, value in config.items())
    return f"{name} ({settings})" if settings else name


def _refuse_other_tokens(selection: Selection, given: ShardFormat, saved: Manifest) -> None:
    """Refuse token files that the format would read as another type than they are packed or indexed as.

    Any bytes are valid tokens of any type, so the wrong type yields noise instead of an error. A file's name or its
    .idx, where they state the type, leave the format no choice.

    Raises:
        ConfigError: names both types.
    """
    dtype = given.config().get("dtype")
    known = saved.config.get("dtype")
    if dtype is None or known is None or dtype == known:
        return
    sizes = {info.key: info.size for info in selection.listing}
    for shard in saved.shards:
        is_free = has_free_dtype(shard.key) and sizes.keys().isdisjoint(index_keys(shard.key))
        if is_free and sizes.get(shard.key) == shard.size:
            raise ConfigError(
                f"{selection.url}{shard.key}: its tokens are {known}, by the manifest beside it, and would be read as "
                f"{dtype}: give dtype={known!r} (--dtype {known}), or run `penstock index --rebuild`"
            )


def same_object(one: ObjectInfo, other: ObjectInfo) -> bool:
    """Return whether two descriptions of a key mean the same content, judged by size and ETag."""
    return one.size == other.size and (one.etag == other.etag or one.etag is None or other.etag is None)


def _without_etags(manifest: Manifest, tasks: Sequence[ShardTask]) -> Manifest:
    """A manifest of these shards that expects no ETag where the store has none, as after copying to such a store."""
    unknown = {task.info.key for task in tasks if task.info.etag is None}
    bare = {task.info.key for task in tasks if task.companion is not None and task.companion.etag is None}
    if not unknown | bare:
        return manifest
    shards = tuple(replace(shard, etag=None) if shard.key in unknown else shard for shard in manifest.shards)
    companions = {
        key: replace(companion, etag=None) if key in bare else companion
        for key, companion in manifest.companions.items()
    }
    return replace(manifest, shards=shards, companions=companions)


def _warn_stale(url: str, *, new: int, gone: int, unchecked: bool = False) -> None:
    changes = " and ".join(
        text for count, text in ((new, f"{new} new or changed shards"), (gone, f"{gone} gone")) if count
    )
    warnings.warn(
        f"the manifest beside {url} is out of date: {changes}; this run uses a corrected copy"
        f"{', and compares no checksums' if unchecked else ''}; run `penstock index {url}` to correct it for all runs",
        StaleManifestWarning,
        stacklevel=2,
    )


def order_tasks(store: Store, selection: Selection, shard_format: ShardFormat, *, is_given: bool) -> list[ShardTask]:
    """The shards of a selection, in sample order; ``is_given``: the caller named the format."""
    with explain_failures(store.url, "listed"):
        by_name = shard_format.shards(store, selection.listing, selection.spelled)
    infos = {info.key: info for info in selection.listing}
    if selection.chosen is None:
        tasks = list(by_name)
    else:
        by_key = {task.info.key: task for task in by_name}
        tasks = []
        for key in selection.chosen:
            task = by_key.get(key)
            if task is None and key in selection.named:
                # A shard that the caller named is accepted, unless its name means another format, or no format while
                # the caller gave none either.
                may_be_shard = "." not in key.rpartition("/")[2] or has_suffix(key, shard_format.other_suffixes)
                if not may_be_shard and not (is_given and format_by_name(key, selection.named) is None):
                    raise DatasetError(
                        f"{selection.url}{key}: not a shard of format {shard_format.name!r} by its name; "
                        "leave it out, or give format="
                    )
                task = ShardTask(infos[key])
            if task is not None:
                tasks.append(task)
    if not tasks:
        data = find_shards([infos[key] for key in selection.chosen or infos], ("",), selection.spelled)
        found = [info for info in data if "." not in info.key.rpartition("/")[2]]
        found = found or find_shards(data, shard_format.other_suffixes, selection.spelled)
        tasks = [ShardTask(info) for info in found]
    if not tasks:
        keys = [info.key for info in selection.listing]
        problem = encrypted_hint(keys) or f"no {shard_format.name} shards among its {len(keys)} objects"
        raise DatasetError(f"{store.url}: {problem}")
    for task in tasks:
        if not is_text(task.info.key):
            raise DatasetError(f"{store.url}: {_why_no_text(task.info.key)}")
    return tasks


def _why_no_text(key: str) -> str:
    """Explain why Python cannot write the name of a local file as text."""
    try:
        name = os.fsencode(key).decode()
    except UnicodeDecodeError:
        return f"the name of the shard {key!a} is not UTF-8; rename it"
    return (
        f"the name of the shard {name!a} is UTF-8, but this process takes names for {sys.getfilesystemencoding()}, by "
        "its locale: set PYTHONUTF8=1, or LC_ALL=C.UTF-8, before Python starts"
    )


def index_one(store: Store, shard_format: ShardFormat, task: ShardTask) -> ShardIndex:
    """Find the chunks of one shard.

    Raises:
        FormatError: the shard cannot be indexed, or has no bytes.
        MemoryLimitError: an allocation failed.
    """
    if task.info.size == 0:
        raise FormatError(task.info.key, _why_empty(store, task.info.key))
    with explain_failures(task.info.key, "indexed"):
        return shard_format.index_shard(store, task)


def _why_empty(store: Store, key: str) -> str:
    try:
        store.head(key)
    except NotFoundError:
        return "is listed, but nothing is there: a link that leads nowhere. Restore what it names, or remove it"
    return "the shard is empty (0 bytes); write it again or remove it"


def index_shards(
    store: Store,
    shard_format: ShardFormat,
    tasks: Sequence[ShardTask],
    *,
    threads: int = INDEX_THREADS,
    advance: Callable[[int], None] = lambda count: None,
) -> list[ShardIndex]:
    """Find the chunks of shards with ``threads`` threads; stops at the first error.

    Raises:
        FormatError: a shard that cannot be indexed, or that has no bytes.
    """

    def index_next(task: ShardTask) -> ShardIndex:
        index = index_one(store, shard_format, task)
        advance(1)
        return index

    ended: SimpleQueue[Future[ShardIndex]] = SimpleQueue()
    with DaemonPool("penstock-index", threads) as pool:
        futures = [pool.submit(index_next, task) for task in tasks]
        for future in futures:
            future.add_done_callback(ended.put)
        for _ in futures:
            ended.get().result()  # in the order in which they end, so that the first error is the last that is awaited
        return [future.result() for future in futures]


def assemble(pending: PendingIndex, found: Mapping[int, ShardIndex]) -> Manifest:
    """Assemble a manifest from known and found indexes, in the order of the tasks.

    Raises:
        FormatError: two shards contradict each other in schema.
        DatasetError: no shard holds a sample.
    """
    unchanged = _take_unchanged(pending, found)
    if unchanged is not None:
        return unchanged
    schema = pending.schema
    shards: list[tuple[ObjectInfo, ShardIndex]] = []
    for position, task in enumerate(pending.tasks):
        index = pending.known.get(position)
        if index is None:
            index = found[position]
            if index.chunks:
                if schema is None:
                    schema = index.schema
                elif index.schema != schema:
                    schema = pending.shard_format.merge_schema(schema, index.schema, task.info.key)
        shards.append((task.info, index))
    manifest = Manifest.build(
        pending.url, pending.shard_format.name, pending.shard_format.config(), schema or {}, shards
    )
    described_by = {} if pending.outdated is None else dict(pending.outdated.companions)
    described_by |= {task.info.key: task.companion for task in pending.tasks if task.companion is not None}
    companions = {shard.key: described_by[shard.key] for shard in manifest.shards if shard.key in described_by}
    return replace(manifest, companions=companions, classes=pending.classes)


def _take_unchanged(pending: PendingIndex, found: Mapping[int, ShardIndex]) -> Manifest | None:
    """Return the manifest beside the data, with its checksums, if all shards added since hold no samples; else None."""
    saved = pending.outdated
    if saved is None or not pending.known or any(index.chunks for index in found.values()):
        return None
    places = {info.key: place for place, info in enumerate(saved.shards)}
    kept = [pending.tasks[position] for position in sorted(pending.known)]
    return _without_etags(take_shards(saved, [places[task.info.key] for task in kept]), kept)


def warn_outdated(pending: PendingIndex, manifest: Manifest) -> None:
    """Warn that a run uses another manifest than the one beside the data, which is out of date."""
    if pending.outdated is None:
        return
    known = {pending.tasks[position].info.key for position in pending.known}
    new = sum(shard.key not in known for shard in manifest.shards)
    if new:
        _warn_stale(pending.url, new=new, gone=0, unchecked=pending.outdated.checksums is not None)


def take_shards(manifest: Manifest, places: Sequence[int]) -> Manifest:
    """A manifest of the shards at ``places`` of another one, in that order."""
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
        parts=None if manifest.parts is None else manifest.parts.take(chunks),
    )


def shard_indexes(manifest: Manifest) -> list[ShardIndex]:
    """The index of each shard of a manifest."""
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
    schema = stored_schema(manifest.schema)
    return [ShardIndex(spans, schema) for spans in chunks]
