"""A checkpoint or leftover that cannot be deleted is noted and tried again, and ends neither a run nor its restarts."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_ranks
from rewound_runs import SPIKE, batches_to_rows
from rewound_runs import train as train_with_a_spike
from small_trainers import make_trainer, rows

from penstock.trainer import CheckpointConfig, World
from penstock.trainer.checkpoint.checkpointer import Checkpointer
from penstock.trainer.checkpoint.folder import list_steps


@pytest.fixture
def hold() -> Iterator[Callable[[Path], None]]:
    """Puts into a folder what nobody can delete until the fixture, or ``umount``, takes it out: a file system."""
    held: list[Path] = []

    def mount(folder: Path) -> None:
        inside = folder / "held"
        inside.mkdir()
        if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", inside], check=False).returncode:
            pytest.skip("mounting a file system needs root")
        held.append(folder.parent)

    yield mount
    for parent in held:
        let_go(parent)


def let_go(checkpoints: Path) -> None:
    for inside in checkpoints.glob("*/held"):
        subprocess.run(["umount", inside], check=False)


def train(world: World, folder: str, steps: int, **checkpoint: Any) -> int:
    saves = {"every_steps": 1, "keep_last": 1, **checkpoint}
    with make_trainer(world, folder, rows(world), steps=steps, checkpoint=saves) as trainer:
        return int(trainer.train().steps)


def notes_in(folder: Path) -> list[str]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [record["note"] for record in records if "could not be deleted" in record.get("note", "")]


def left_in(checkpoints: Path) -> list[str]:
    return sorted(path.name for path in checkpoints.glob("*.tmp"))


def test_an_old_checkpoint_that_cannot_be_deleted_is_noted_and_tried_again(
    tmp_path: Path, hold: Callable[[Path], None]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    assert run_ranks(train, 2, str(tmp_path), 1) == [1, 1]
    hold(checkpoints / "step-1")
    assert run_ranks(train, 2, str(tmp_path), 4) == [4, 4]
    assert list_steps(checkpoints) == [4]
    assert left_in(checkpoints) == ["step-1.removed.tmp"]
    (note,) = notes_in(tmp_path)  # once, although each save tries
    assert note.startswith(f"old checkpoints could not be deleted from {checkpoints}: step-1.removed.tmp (")
    assert note.endswith("the next save tries again")
    assert run_ranks(train, 2, str(tmp_path), 5) == [5, 5], "a restart goes on beside it"
    assert left_in(checkpoints) == ["step-1.removed.tmp"]
    let_go(checkpoints)
    assert run_ranks(train, 2, str(tmp_path), 6) == [6, 6]
    assert left_in(checkpoints) == []
    assert list_steps(checkpoints) == [6]


@pytest.mark.slow
def test_one_that_is_saved_again_is_replaced_and_never_comes_back(
    world: World, tmp_path: Path, hold: Callable[[Path], None]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for _ in range(2):  # step 1 is saved, and what it replaces cannot be deleted, twice
        with make_trainer(world, str(tmp_path), steps=1, checkpoint={"every_steps": 1, "keep_last": 1}) as trainer:
            trainer.train()
            hold(checkpoints / "step-1")
            trainer._saver.save(1, trainer._gather_state(), blocking=True, again=True)
        assert list_steps(checkpoints) == [1]
    assert left_in(checkpoints) == ["step-1.removed-1.tmp", "step-1.removed.tmp"]
    assert train(world, str(tmp_path), 2) == 2
    assert list_steps(checkpoints) == [2], "the step that was replaced has gone, and is not brought back"
    let_go(checkpoints)
    assert train(world, str(tmp_path), 3) == 3
    assert left_in(checkpoints) == []


def test_what_a_killed_save_left_and_cannot_be_deleted_hinders_neither_start_nor_save(
    world: World, tmp_path: Path, hold: Callable[[Path], None]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    for name in ("step-2.tmp", "step-1.replaced.tmp"):
        (checkpoints / name).mkdir(parents=True)
        hold(checkpoints / name)
    assert train(world, str(tmp_path), 3) == 3
    assert list_steps(checkpoints) == [3]
    assert "step-1.removed.tmp" in notes_in(tmp_path)[0]
    let_go(checkpoints)
    Checkpointer(CheckpointConfig(folder=str(checkpoints)), world).close()
    assert left_in(checkpoints) == []


@pytest.mark.slow
def test_a_checkpoint_that_a_rewind_cannot_delete_is_out_of_the_way(
    world: World, tmp_path: Path, hold: Callable[[Path], None]
) -> None:
    checkpoints = tmp_path / "checkpoints"
    options: dict[str, Any] = {"bad": batches_to_rows(14), "spike": {**SPIKE, "margin": 5}}
    train_with_a_spike(world, tmp_path, steps=13, **options)
    hold(checkpoints / "step-12")
    run = train_with_a_spike(world, tmp_path, steps=20, **options)
    assert run.rewinds == 1
    assert run.steps[2][0] == 8
    assert left_in(checkpoints) == ["step-12.removed.tmp"]
    assert list_steps(checkpoints)[0] == 20
