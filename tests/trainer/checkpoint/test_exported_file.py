"""The file of final weights that a run exports is as readable and as durable as what else it writes."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
from small_trainers import make_trainer

from penstock.trainer import World


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_the_exported_weights_are_synced_and_for_whom_the_umask_lets(
    world: World, tmp_path: Path, umask: int, mode: int
) -> None:
    synced: set[int] = set()
    real = os.fsync

    def sync(fd: int) -> None:
        synced.add(os.fstat(fd).st_ino)
        real(fd)

    before = os.umask(umask)
    try:
        options = {"checkpoint": {"every_steps": 2}, "export": "weights/final.safetensors"}
        with mock.patch("os.fsync", sync), make_trainer(world, str(tmp_path), **options) as trainer:
            trainer.train()
    finally:
        os.umask(before)
    found = tmp_path / "weights" / "final.safetensors"
    assert found.stat().st_mode & 0o777 == mode
    assert {found.stat().st_ino, found.parent.stat().st_ino} <= synced
    assert [path.name for path in found.parent.iterdir()] == [found.name]
