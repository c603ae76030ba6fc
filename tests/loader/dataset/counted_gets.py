"""What is asked of a store while a data set is opened."""

from __future__ import annotations

from collections.abc import Callable

PutShards = Callable[..., list[int]]


def keys(manifest: object) -> list[str]:
    return [shard.key for shard in manifest.shards]  # type: ignore[attr-defined]
