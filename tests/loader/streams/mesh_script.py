"""One process of a mesh of 2 x 2: gives the batches of a loader that drops samples, and a state in mid-epoch."""

from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from penstock import DistributedDataLoader
from penstock.trainer import World


def keep(sample: dict[str, Any]) -> bool:
    return int(sample["n"]) % 3 != 0


def main(_: World, source: str) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    epochs: list[list[list[int]]] = []
    state = None
    with DistributedDataLoader(
        source, batch_size=4, keep=keep, mesh=mesh, with_ids=True, last_batch="partial"
    ) as loader:
        for _ in range(2):
            epochs.append([])
            for batch in loader:
                epochs[-1].append(batch["__id__"].tolist())
                if len(epochs) == 1 and len(epochs[0]) == 5:
                    state = loader.state_dict()
        dist.barrier()
    return {"epochs": epochs, "state": state}
