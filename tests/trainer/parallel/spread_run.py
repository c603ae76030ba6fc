"""A rank that torchrun starts: trains on its GPU in each of the layouts, and rank 0 prints the weights.

Arguments: an empty folder, a list of layouts as JSON, and the device, if it is another. Where there are fewer GPUs than
ranks, all share the first: each says to NCCL, which refuses two ranks of one host on one GPU, that it is a host of its
own, and they talk over sockets.
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist
from spread_cases import make_mixture, make_model, make_trainer, whole_weights

from penstock.trainer import close_world, open_world


def share_first_gpu() -> None:
    rank, ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": rank, "GROUP_WORLD_SIZE": ranks}
    os.environ |= {"NCCL_HOSTID": f"rank-{rank}", "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}


def main(folder: str, layouts: str, device: str = "cuda") -> None:
    if device == "cuda" and torch.cuda.device_count() < int(os.environ["WORLD_SIZE"]):
        share_first_gpu()
    world = open_world(device=device)
    found = []
    for number, parallel in enumerate(json.loads(layouts)):
        model = make_mixture if "ep" in parallel else make_model
        with make_trainer(f"{folder}/{number}", world, 4, parallel, model=model) as trainer:
            trainer.train()
        own = {name: one.tolist() for name, one in whole_weights(trainer.parallel.inner).items()}
        stages: list[dict[str, object]] = [{}] * world.world_size
        dist.all_gather_object(stages, own)
        found.append({name: one for stage in stages for name, one in stage.items()})
    if world.is_first:
        print("FOUND" + json.dumps(found), flush=True)
    close_world()


if __name__ == "__main__":
    main(*sys.argv[1:])
