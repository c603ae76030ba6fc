"""Checksums of chunks by tasks on a Ray cluster, for a manifest; what is summed is kept, and not summed again."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from os import cpu_count
from time import monotonic
from typing import Any

import numpy as np
import xxhash

from ...storage import open_store
from ...storage.ray_cluster import make_task, open_cluster, wait_for_task
from ...storage.threads.daemon_pool import DaemonPool
from ..counters import Counters
from ..dataset.cache import SealedFolder
from ..dataset.manifest import Manifest, SumArray
from ..errors import DatasetError
from ..formats.detect import make_format
from .checksum import known_sums, sum_chunk, with_sums
from .layouts import HeaderCache

Sums = tuple[int, SumArray]
_TASK_BYTES = 64 << 20
_THREADS = 4  # of a task: it waits for the store most of the time
_HEADER_BYTES = 32 << 20
_KEEP_EVERY_S = 5.0
_KEPT = 16


def sum_in_cluster(
    manifest: Manifest,
    cluster: str,
    *,
    storage_options: Mapping[str, Any] | None = None,
    saved: Manifest | None = None,
) -> Manifest:
    """The manifest with the checksums that ``sum_chunks`` finds, by tasks on a Ray cluster (see ``open_cluster``).

    Sums are kept in this node's cache while the work goes on: one that was stopped goes on where it was.

    Raises:
        ClusterError: Ray is not installed, or no cluster is there.
        DatasetError: a task failed again and again.
        PenstockError: what reading raised, on whichever node.
    """
    from ..progress import show_progress

    known = {} if saved is None else known_sums(saved)
    kept = _Kept(manifest)
    found = kept.load()
    for index in range(manifest.num_chunks):
        before = known.get(manifest.chunk(index))
        if before is not None:
            found[index] = before
    todo = [index for index in range(manifest.num_chunks) if index not in found]
    with show_progress("reading", manifest.num_bytes, unit="B", enabled=True) as advance:
        advance(sum(int(manifest.lengths[index]) for index in found))
        if todo:
            with open_cluster(cluster, cpus=max(2, cpu_count() or 1)) as ray:
                for index, sums in _spread(ray, manifest, todo, storage_options, kept.keep_of(found)):
                    found[index] = sums
                    advance(int(manifest.lengths[index]))
    kept.forget()
    return with_sums(manifest, [found[index] for index in range(manifest.num_chunks)])


def _spread(
    ray: Any,
    manifest: Manifest,
    todo: Sequence[int],
    storage_options: Mapping[str, Any] | None,
    keep: Callable[[], None],
) -> Iterator[tuple[int, Sums]]:
    held = ray.put(manifest.to_bytes())
    work, ahead = make_task(ray, _sum_some)
    pending: list[Any] = []
    groups = _group(todo, manifest.lengths)
    try:
        while True:
            while len(pending) < ahead and (group := next(groups, None)) is not None:
                pending.append(work.remote(held, manifest.url, dict(storage_options or {}), group))
            if not pending:
                return
            done, pending = ray.wait(pending, num_returns=1)
            yield from wait_for_task(ray, done[0], DatasetError)
            keep()
    finally:
        for task in pending:
            ray.cancel(task)


def _group(todo: Iterable[int], lengths: Any) -> Iterator[list[int]]:
    """Cut chunks into groups of some bytes, neighbours together."""
    group: list[int] = []
    size = 0
    for index in todo:
        if group and size + int(lengths[index]) > _TASK_BYTES:
            yield group
            group, size = [], 0
        group.append(index)
        size += int(lengths[index])
    if group:
        yield group


def _sum_some(
    data: bytes, url: str, storage_options: Mapping[str, Any], indexes: Sequence[int]
) -> list[tuple[int, Sums]]:
    """In a task: the checksums of some chunks."""
    manifest = _read(data, url)
    shard_format = make_format(manifest.format, manifest.config)
    store = open_store(url, storage_options=storage_options or None)
    headers = HeaderCache(shard_format, store, Counters(), budget_bytes=_HEADER_BYTES)

    def sum_one(index: int) -> tuple[int, Sums]:
        chunk = manifest.chunk(index)
        return index, sum_chunk(store, shard_format, headers.get(chunk.shard), chunk)

    try:
        with DaemonPool("penstock-sum", _THREADS) as pool:
            return list(pool.map(sum_one, indexes))
    finally:
        store.close()


@lru_cache(maxsize=1)
def _read(data: bytes, url: str) -> Manifest:
    return Manifest.from_bytes(data, url)


class _Kept:
    """Sums of an unfinished work, in a file of this node's cache. All mutable state: when it was written last.

    Where the store has no ETags nothing is kept, because an object could have changed unnoticed.
    """

    def __init__(self, manifest: Manifest) -> None:
        self._files = SealedFolder("sums", None, kept=_KEPT)
        shards = [[shard.key, shard.size, shard.etag] for shard in manifest.shards]
        self._key: str | None = None
        if all(shard.etag is not None for shard in manifest.shards):
            text = json.dumps([manifest.url, manifest.fingerprint, shards])
            self._key = xxhash.xxh3_128_hexdigest(text.encode())
        self._written = monotonic()

    def load(self) -> dict[int, Sums]:
        """The sums by chunk that were kept."""
        data = None if self._key is None else self._files.load(self._key)
        if data is None:
            return {}
        with np.load(io.BytesIO(data), allow_pickle=False) as held:
            cuts = np.cumsum(held["counts"])[:-1]
            parts = np.split(held["parts"], cuts)
            rows = zip(held["chunks"].tolist(), held["wholes"].tolist(), parts, strict=True)
            return {chunk: (whole, part) for chunk, whole, part in rows}

    def keep_of(self, found: Mapping[int, Sums]) -> Callable[[], None]:
        """A function that keeps what is found by then, every few seconds."""

        def keep() -> None:
            if self._key is None or monotonic() - self._written < _KEEP_EVERY_S:
                return
            out = io.BytesIO()
            np.savez(
                out,
                chunks=np.array(list(found), np.int64),
                wholes=np.array([whole for whole, _ in found.values()], np.uint64),
                counts=np.array([len(parts) for _, parts in found.values()], np.int64),
                parts=np.concatenate([np.zeros(0, np.uint64), *(parts for _, parts in found.values())]),
            )
            self._files.save(self._key, out.getvalue())
            self._written = monotonic()

        return keep

    def forget(self) -> None:
        """Delete what was kept: the manifest has it by now."""
        if self._key is not None:
            self._files.forget(self._key)
