from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from penstock.storage import MemoryStore
from penstock.trainer import World


@pytest.fixture
def alone() -> Iterator[World]:
    """A world of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield _world_of_one()
    dist.destroy_process_group()


def _world_of_one() -> World:
    return World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        num_nodes=1,
        device=torch.device("cpu"),
        backend="gloo",
    )


@pytest.fixture
def bucket() -> Iterator[MemoryStore]:
    store = MemoryStore(f"mem://{uuid4().hex}/run").create()
    yield store
    store.drop()
