from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist
from started_threads import started_threads

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


@pytest.fixture
def staging(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where checkpoints are fetched to: empty again after every test, and no threads are left."""
    folder = tmp_path_factory.mktemp("s")  # short: sockets of processes that tests start lie below it
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    yield folder
    assert not list(folder.glob("penstock-checkpoint-*"))
    assert not [thread for thread in started_threads() if thread.name.startswith("penstock")]
