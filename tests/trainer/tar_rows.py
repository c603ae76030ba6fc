"""Rows in tar shards, and a run over them that logs each delivery: what several tests start with torchrun."""

from __future__ import annotations

import io
import os
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from small_trainers import Line, make_trainer
from torch import nn

from penstock import DistributedDataLoader
from penstock.trainer import World


def write_shards(folder: Path, *, samples: int) -> None:
    """Shards of uneven size: of 1, 2, 3 ... samples."""
    folder.mkdir()
    sample, shard = 0, 0
    while sample < samples:
        with tarfile.open(folder / f"rows-{shard:03d}.tar", "w") as tar:
            for _ in range(min(shard + 1, samples - sample)):
                held = io.BytesIO()
                np.save(held, np.array([sample, -sample], np.float32) / samples)
                member = tarfile.TarInfo(f"{sample:04d}.x.npy")
                member.size = len(held.getvalue())
                tar.addfile(member, io.BytesIO(held.getvalue()))
                sample += 1
        shard += 1


def square_x(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
    return model(batch["x.npy"]).square().sum(), len(batch["x.npy"])


@contextmanager
def training(world: World, folder: Path, *, step_s: float = 0.0, **options: Any) -> Iterator[Any]:
    """A trainer on ``folder/shards``, which keeps its log of deliveries and a line for each start in ``folder``."""

    def loss(model: nn.Module, batch: dict[str, Any]) -> tuple[torch.Tensor, int]:
        time.sleep(step_s)
        return square_x(model, batch)

    with DistributedDataLoader(
        str(folder / "shards"),
        global_batch_size=6,
        last_batch="partial",
        audit_dir=folder / "audit",
        with_ids=True,
        rank=world.rank,
        world_size=world.world_size,
    ) as loader:
        options = {"loss": loss, "steps": None, "epochs": 3, "stall_timeout_s": 60.0, **options}
        with make_trainer(world, str(folder / "run"), loader, Line(), **options) as trainer:
            # One write to a file opened for appending is whole, however many ranks write.
            with (folder / "starts").open("a", buffering=1) as starts:
                starts.write(f"{world.rank} {world.world_size} {trainer.progress.step} {os.getpid()}\n")
            yield trainer


def read_starts(folder: Path) -> list[tuple[int, ...]]:
    """(rank, world size, step gone on from, process id) of each start so far."""
    path = folder / "starts"
    return [tuple(map(int, line.split())) for line in path.read_text().splitlines()] if path.exists() else []
