"""One process of the tests of groups: epochs on a mesh of four, and what this process got of them."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock import DistributedDataLoader, SequenceCut, TokensFormat
from penstock.trainer import World


def read_bucket(_: World, told: dict[str, Any]) -> dict[str, Any]:
    """The sample ids of an epoch without a cache, and of one with a cache that the processes share."""
    report = {}
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for folder, cache in (("plain", None), ("cached", told["cache"])):
        with DistributedDataLoader(
            f"{told['bucket']}/{folder}/",
            storage_options=told["options"],
            format=TokensFormat(**told["format"]),
            batch_size=16,
            mesh=mesh,
            with_ids=True,
            cache_dir=cache,
        ) as loader:
            report[folder] = [batch["__id__"].tolist() for batch in loader]
        dist.barrier()
    return report


def read_rows(_: World, rows: str) -> list[dict[str, Any]]:
    """The batches of an epoch on two stages of two parts of sequences each."""
    mesh = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("dp", "pp", "cp"))
    with DistributedDataLoader(
        rows,
        batch_size=8,
        mesh=mesh,
        with_ids=True,
        fields_by_stage={"tokens": "first", "labels": "last"},
        sequence_cut=SequenceCut(["tokens", "labels"]),
    ) as loader:
        return [{name: values.tolist() for name, values in batch.items()} for batch in loader]
