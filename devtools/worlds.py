"""Worlds of the ranks that a tool starts on this machine: on the CPU, by gloo, one after another in a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from penstock.trainer.ranks.world import World


@contextmanager
def open_local_world(rank: int, world_size: int, store: str) -> Iterator[World]:
    """Join the other ranks by a file ``store``, which none has used before, and leave them at the end; a collective."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    yield World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )
    dist.destroy_process_group()
