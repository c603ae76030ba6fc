"""Manifests of shards that are nowhere."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.loader.dataset.manifest import Manifest
from penstock.loader.formats.shard import ChunkSpan, ShardIndex
from penstock.storage import ObjectInfo


def make_manifest(sizes: Sequence[Sequence[int]], *, checksums: bool = True, url: str = "mem://a/data") -> Manifest:
    """``sizes``: for each shard the samples of its chunks."""
    shards: list[tuple[ObjectInfo, ShardIndex]] = []
    for number, chunks in enumerate(sizes):
        spans = [ChunkSpan(100 * i, 90, samples, 7 * samples) for i, samples in enumerate(chunks)]
        shards.append((ObjectInfo(f"é/shard {number}.tar", 100 * len(chunks), f"etag{number}"), ShardIndex(spans, {})))
    count = sum(map(len, sizes))
    sums = np.arange(count, dtype=np.uint64) << np.uint64(60) if checksums else None
    return Manifest.build(url, "tar", {"deep": {"a": 1}}, {"fields": ["x"]}, shards, sums)
