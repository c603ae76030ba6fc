"""A disk that fills up in mid-run costs old checkpoints, not the run."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer
from torch import nn

from penstock.trainer import CheckpointConfig, CheckpointError, CheckpointRoomError, World
from penstock.trainer.checkpoint import traffic
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.folder import list_steps

WEIGHTS = 100_000  # 0.4 MB


class SmallDisk:
    """Refuses to write shards once the files below ``folder`` would take more than ``capacity_bytes``."""

    def __init__(self, folder: Path, capacity_bytes: float, error: int = errno.ENOSPC) -> None:
        self.folder, self.capacity_bytes, self.error = folder, capacity_bytes, error
        self._write = traffic.CountedFile._write_piece

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        disk = self

        def write(file: Any, piece: memoryview) -> int:
            used = sum(path.stat().st_size for path in disk.folder.rglob("*") if path.is_file())
            if used + len(piece) > disk.capacity_bytes:
                raise OSError(disk.error, os.strerror(disk.error))
            return disk._write(file, piece)

        monkeypatch.setattr(traffic.CountedFile, "_write_piece", write)


class Notes:
    """An observer that keeps notes in memory: a file on a full disk may lack some."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def record(self, kind: str, step: int, values: Mapping[str, Any]) -> None:
        if kind == "note":
            self.texts.append(str(values["note"]))

    def close(self) -> None:
        pass


def make(world: World, folder: Path, steps: int, observers: Sequence[Notes] = (), **checkpoint: Any) -> Any:
    class Wide(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WEIGHTS))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum() * self.scale.mean()

    options = {"every_steps": 1, **checkpoint}
    return make_trainer(world, str(folder), model=Wide(), steps=steps, checkpoint=options, observers=observers)


def notes_in(folder: Path) -> list[str]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["note"] for record in records if record["kind"] == "note"]


@pytest.mark.slow
@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_costs_the_oldest_checkpoints_and_not_the_run(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    SmallDisk(tmp_path, 1.4e6).install(monkeypatch)  # room for three, and four are needed
    with make(world, tmp_path, 6, keep_last=3, background=background) as trainer:
        summary = trainer.train()
    assert summary.steps == 6
    assert list_steps(tmp_path / "checkpoints") == [6, 5, 4]
    notes = notes_in(tmp_path)
    assert any("the checkpoint of step 1 was deleted" in note and "room for step 4" in note for note in notes), notes


@pytest.mark.slow
def test_a_disk_that_stays_full_is_noted_and_the_next_save_succeeds(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = SmallDisk(tmp_path, 0.7e6, errno.EDQUOT)  # room for one, which must stay
    disk.install(monkeypatch)
    with make(world, tmp_path, 3) as trainer:
        with pytest.raises(CheckpointRoomError, match=r"step 3 could not be saved.*the disk is full"):
            trainer.train()  # the last save alone is worth an error
        assert trainer.progress.step == 3
    assert list_steps(tmp_path / "checkpoints") == [1]
    (note,) = [note for note in notes_in(tmp_path) if "step 2 could not be saved" in note]
    assert note.endswith("training continues, and the next save tries again")
    assert os.strerror(errno.EDQUOT) in note
    assert not list((tmp_path / "checkpoints").glob("*.tmp"))
    disk.capacity_bytes = 9e6
    with make(world, tmp_path, 4) as trainer:
        assert trainer.progress.step == 1
        trainer.train()
    assert list_steps(tmp_path / "checkpoints") == [4, 3, 2]


def test_other_errors_of_a_save_stay_errors(world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    SmallDisk(tmp_path, 0.7e6, errno.EIO).install(monkeypatch)
    with (
        make(world, tmp_path, 6) as trainer,
        pytest.raises(CheckpointError, match=r"step 2 could not be saved.*Input/output error"),
    ):
        trainer.train()


def save_until_full(world: World, folder: str) -> list[str]:
    notes = Notes()
    with make(world, Path(folder), 6, observers=[notes], keep_last=3) as trainer:
        trainer.train()
    return notes.texts


@pytest.fixture
def small_mount(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.6 MB."""
    folder = tmp_path / "mount"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1600k", "none", folder], check=False).returncode:
        pytest.skip("mounting a file system needs root")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


def test_two_ranks_on_a_real_full_disk_go_on(small_mount: Path) -> None:
    notes = run_ranks(save_on_a_filling_disk, 2, str(small_mount))[0]
    assert any("was deleted from" in note for note in notes), notes
    assert list_steps(small_mount / "checkpoints")[0] == 6


def save_on_a_filling_disk(world: World, folder: str) -> list[str]:
    """The start asks for room for all, which this disk has not; so the check is answered as if it had."""
    real = shutil.disk_usage
    shutil.disk_usage = lambda path: SimpleNamespace(free=1 << 40)  # type: ignore[assignment]
    try:
        return save_until_full(world, folder)
    finally:
        shutil.disk_usage = real


def test_the_start_asks_for_room_for_all_that_retention_keeps(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = nn.Linear(1000, 100, bias=False)  # 1.2 MB with two moments
    free = SimpleNamespace(free=5e6)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    config = CheckpointConfig(folder=str(tmp_path), keep_last=3, keep_best=1, best="max")
    with Checkpointer(config, world) as checkpoints:
        with pytest.raises(CheckpointRoomError, match=r"takes about 1\.2 MB, and 4 kept with one .* need 6\.0 MB"):
            checkpoints.check_room(net)
        (tmp_path / "step-1").mkdir()
        (tmp_path / "step-1" / "weights").write_bytes(bytes(1_200_000))  # retention deletes it in time
        checkpoints.check_room(net)
