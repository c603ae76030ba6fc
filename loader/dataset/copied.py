"""Tells whether shards are copies of those that a manifest was made of: the same bytes, with other ETags."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ...storage.hashing import xxh3_64
from ...storage.threads.daemon_pool import DaemonPool

if TYPE_CHECKING:
    from ...storage import Store
    from .manifest import Manifest

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
