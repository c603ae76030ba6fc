"""One rank of the test of meshes: three loaders on three meshes, each going on where the one before stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock import DistributedDataLoader
from penstock.loader import ConfigError
from penstock.trainer import World

MESHES = [(("dp", "tp"), 5), (("dp_replicate", "dp_shard"), 4), (("pp", "dp"), None)]


def main(_: World, source: str, folder: str) -> dict[str, Any]:
    state: dict[str, Any] | None = None
    delivered: list[dict[str, Any]] = []
    for names, stop in MESHES:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
        with DistributedDataLoader(
            source,
            global_batch_size=12,
            mesh=mesh,
            lanes=16,
            with_ids=True,
            last_batch="partial",
            audit_dir=Path(folder) / "audit",
        ) as loader:
            if state is not None:
                loader.load_state_dict(state)
            batches = []
            for batch in loader:
                batches.append(batch["__id__"].tolist())
                if len(batches) == stop:
                    break
            state = loader.state_dict()
            delivered.append({"place": [loader.rank, loader.world_size], "batches": batches, "state": state})
        dist.barrier()
    two = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "x"))
    try:
        DistributedDataLoader(source, batch_size=4, mesh=two)
    except ConfigError as error:
        refused = str(error)
    with DistributedDataLoader(source, batch_size=4, mesh=two, data_dims=["x"]) as loader:
        named = [loader.rank, loader.world_size]
    with DistributedDataLoader(source, batch_size=4, mesh=two["dp"]) as loader:
        sliced = [loader.rank, loader.world_size]
    return {"delivered": delivered, "refused": refused, "named": named, "sliced": sliced}
