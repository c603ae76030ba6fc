"""Tells whether shards are copies of those that a manifest was made of: the same bytes, with other ETags."""

from __future__ import annotations

import numpy as np

from ...storage import Store
from ...storage.daemon_pool import DaemonPool
from ...storage.hashing import xxh3_64
from .manifest import Manifest


def is_copy(store: Store, manifest: Manifest) -> bool:
    """Whether some chunks have the manifest's checksums: the shortest of the first, the middle and the last shard.

    All others are compared when they are read, so that what is no copy, and is not found here, is an error there.

    Raises:
        StorageError: a shard cannot be read.
    """
    assert manifest.checksums is not None
    places = sorted({0, len(manifest.shards) // 2, len(manifest.shards) - 1})
    with DaemonPool("penstock-index", len(places)) as pool:
        return all(pool.map(lambda place: _is_same(store, manifest, place), places))


def _is_same(store: Store, manifest: Manifest, place: int) -> bool:
    assert manifest.checksums is not None
    first, stop = np.searchsorted(manifest.shard_index, [place, place + 1]).tolist()
    shortest = first + int(manifest.lengths[first:stop].argmin())
    chunk = manifest.chunk(shortest)
    data = store.get(chunk.shard.key, chunk.byte_range, etag=chunk.shard.etag)
    return xxh3_64(data) == int(manifest.checksums[shortest])
