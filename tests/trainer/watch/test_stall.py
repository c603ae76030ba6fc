from __future__ import annotations

import io
import re
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hanging_store import HangingFileSystem, register_hanging_store
from launch_ranks import Ranks
from small_trainers import make_trainer

from penstock import DistributedDataLoader
from penstock.trainer import Evaluation, World
from penstock.trainer.checkpoint import traffic

STALL_TIMEOUT_S = 8.0


class Hanging:
    """Batches that stop coming, or break, on one rank after two steps."""

    def __init__(self, rank: int, how: str) -> None:
        self._hangs = rank == 1
        self._how = how

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(5):
            if self._hangs and index == 2:
                if self._how == "error":
                    raise ValueError("shard train-7.tar cannot be read")
                time.sleep(600.0)
            yield {"x": torch.ones(2, 2)}

    def activity(self) -> dict[str, Any]:
        raise RuntimeError("and this is no reason to stop watching")


def train_and_hang(world: World, folder: str, how: str) -> None:
    with make_trainer(world, folder, Hanging(world.rank, how), steps=5, stall_timeout_s=STALL_TIMEOUT_S) as trainer:
        trainer.train()


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("stall", "rank 1 is stalled in fetch (step=2, epoch=0, activity=RuntimeError: and this is no reason"),
        ("error", "shard train-7.tar cannot be read"),
    ],
)
def test_a_rank_whose_data_stop_stops_all_in_time_with_rank_phase_and_step(
    tmp_path: Path, how: str, reason: str
) -> None:
    ranks: Any = Ranks(train_and_hang, 2, str(tmp_path), how)
    outcomes = ranks.join(timeout_s=120.0)
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    report = (tmp_path / "stalls" / "stall-rank-0.txt").read_text()
    assert reason in report
    assert "rank 1" in report


def save_slowly(world: World, folder: str) -> int:
    """The last save, which blocks, takes rank 0 at least one and a half time-outs."""
    write = traffic.CountedFile._write_piece

    def write_slowly(file: traffic.CountedFile, piece: memoryview) -> int:
        time.sleep(0.5 if world.rank == 0 else 0.0)
        return write(file, piece[:8_000])

    traffic.CountedFile._write_piece = write_slowly  # type: ignore[method-assign]
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 40_000))
    with make_trainer(
        world,
        folder,
        Hanging(0, ""),
        model=model,
        parallel={"zero": 2},
        checkpoint={"every_steps": 1000},
        steps=2,
        stall_timeout_s=STALL_TIMEOUT_S,
    ) as trainer:
        return int(trainer.train().steps)


@pytest.mark.full
def test_a_blocking_save_longer_than_the_timeout_is_no_stall_while_it_writes(tmp_path: Path) -> None:
    began_s = time.monotonic()
    outcomes = Ranks(save_slowly, 2, str(tmp_path)).join(timeout_s=150.0)
    assert [outcome.value for outcome in outcomes] == [2, 2], list((tmp_path / "stalls").glob("*"))
    assert time.monotonic() - began_s > 1.5 * STALL_TIMEOUT_S, "the save was too quick to show anything"


class HangsBefore(Hanging):
    """On rank 1 the loader hangs, or fails, before training."""

    def __init__(self, rank: int, how: str) -> None:
        super().__init__(0, how)
        self._is_victim = rank == 1

    def __len__(self) -> int:
        self._meet("length")
        return 5

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._meet("state")

    def _meet(self, where: str) -> None:
        if self._is_victim and self._how == f"{where} error":
            raise OSError("the index cannot be read")
        if self._is_victim and self._how == f"{where} hangs":
            time.sleep(600.0)


def hang_before_training(world: World, folder: str, how: str) -> None:
    options: dict[str, Any] = {"steps": 2, "checkpoint": {"every_steps": 1}, "stall_timeout_s": STALL_TIMEOUT_S}
    if how.startswith("state"):
        with make_trainer(world, folder, HangsBefore(world.rank, ""), **options) as trainer:
            trainer.train()
    make_trainer(world, folder, HangsBefore(world.rank, how), **options)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("length hangs", "rank 1 is stalled in loader length"),
        ("length error", "rank 1 failed in loader length (step=0, epoch=0)"),
        ("state hangs", "rank 1 is stalled in loader state"),
    ],
)
def test_a_rank_that_hangs_or_fails_before_training_stops_all_by_name(tmp_path: Path, how: str, reason: str) -> None:
    ranks: Any = Ranks(hang_before_training, 2, str(tmp_path), how)
    outcomes = ranks.join(timeout_s=120.0)
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    assert reason in (tmp_path / "stalls" / "stall-rank-0.txt").read_text()


def write_shards(folder: Path) -> None:
    folder.mkdir()
    for shard in range(4):
        with tarfile.open(folder / f"rows-{shard}.tar", "w") as tar:
            for sample in range(4):
                held = io.BytesIO()
                np.save(held, np.full(2, sample, np.float32))
                member = tarfile.TarInfo(f"{shard}-{sample}.x.npy")
                member.size = len(held.getvalue())
                tar.addfile(member, io.BytesIO(held.getvalue()))


def square_x(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x.npy"]).square().sum(), len(batch["x.npy"])


def measure_x(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"loss": square_x(model, batch)}


def dawdle(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["__key__"] == "3-0":
        time.sleep(600.0)
    return sample


def train_on_a_store_that_hangs(world: World, folder: str, where: str) -> None:
    register_hanging_store()
    url = f"hanging://{folder}/shards"
    place: dict[str, Any] = {"rank": world.rank, "world_size": world.world_size, "batch_size": 2, "shuffle": False}
    local = f"{folder}/shards"
    transform = dawdle if where == "transform" else None
    with (
        DistributedDataLoader(url if where == "fetch" else local, transform=transform, **place) as loader,
        DistributedDataLoader(url if where == "evaluation" else local, **place) as test,
        make_trainer(
            world,
            folder,
            loader,
            loss=square_x,
            evaluation=Evaluation(batches=test, metrics=measure_x),
            evaluate={"every": 1} if where == "evaluation" else {"every": 100},
            steps=20,
            stall_timeout_s=STALL_TIMEOUT_S,
        ) as trainer,
    ):
        if world.rank == 1:  # not before: making a loader reads the shards, to index them
            HangingFileSystem.hangs_at = "rows-3.tar"
        trainer.train()


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        ("fetch", r"in fetch \(waiting_for=chunk at byte 0 of rows-3\.tar, since_s=\d\.\d, step=\d, epoch=0\)"),
        (
            "transform",
            r"in fetch \(waiting_for=decoding and transforming samples 8, 12 of epoch 0, since_s=.*, step=\d, .*\)",
        ),
        ("evaluation", r"in evaluation fetch \(waiting_for=chunk at byte 0 of rows-3\.tar, .*step=1, epoch=0\)"),
    ],
)
def test_a_stalled_loader_is_told_with_what_its_next_batch_waits_for(tmp_path: Path, where: str, reason: str) -> None:
    write_shards(tmp_path / "shards")
    ranks: Any = Ranks(train_on_a_store_that_hangs, 2, str(tmp_path), where)
    outcomes = ranks.join(timeout_s=120.0)
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    for rank in range(2):
        report = (tmp_path / "stalls" / f"stall-rank-{rank}.txt").read_text()
        found = re.search(rf"training stops: rank 1 is stalled {reason} for (\d+\.\d) s", report)
        assert found, report
        assert float(found[1]) < STALL_TIMEOUT_S
