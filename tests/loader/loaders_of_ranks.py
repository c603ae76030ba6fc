"""The loaders of all ranks in one process, and a data set of shards of uneven sizes."""

from __future__ import annotations

from typing import Any

from penstock import DistributedDataLoader, Manifest

SIZES = [37, 5, 80, 1, 64, 23, 90, 12]


def ranks(source: str | Manifest, world_size: int, **options: Any) -> list[DistributedDataLoader]:
    return [DistributedDataLoader(source, rank=rank, world_size=world_size, **options) for rank in range(world_size)]


def ids_of(batch: dict[str, Any]) -> list[int]:
    ids: list[int] = batch["__id__"].tolist()
    return ids
