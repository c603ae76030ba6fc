"""TensorBoard's events after restarts and rewinds, and while there is no room for them."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from small_trainers import make_trainer

from penstock.trainer import TemporaryObserverError, TrainerError, World
from penstock.trainer.report import observers
from penstock.trainer.report.observers import TensorBoard

pytest.importorskip("tensorboard", reason="install penstock[metrics]")


def refuse(*arguments: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def shown(folder: Path, name: str = "train/loss") -> list[int]:
    """The steps that TensorBoard shows."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(folder))
    found.Reload()
    return [event.step for event in found.Scalars(name)]


@pytest.mark.slow
def test_steps_that_are_made_again_after_a_restart_are_shown_once(world: World, tmp_path: Path) -> None:
    def train(steps: int) -> None:
        options: dict[str, Any] = {"report": {"tensorboard": True, "quiet": True, "every": 1}}
        with make_trainer(world, str(tmp_path), steps=steps, checkpoint={"every_steps": 2}, **options) as trainer:
            trainer.train()

    train(5)
    for name in ("step-4", "step-5"):
        (tmp_path / "checkpoints" / name).rename(tmp_path / name)  # as if the run had been killed before
    train(7)
    assert shown(tmp_path / "tensorboard") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.slow
def test_steps_that_a_rewind_takes_back_are_not_shown(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for step in (1, 2, 3):
        board.record("train", step, {"loss": 1.0})
    board.record("rewind", 3, {"to_step": 1, "why": "a spike"})
    board.record("train", 2, {"loss": 0.5})
    board.close()
    assert shown(tmp_path) == [1, 2]
    assert shown(tmp_path, "rewind/to_step") == [3]


def test_a_full_disk_costs_records_and_not_all_that_follow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = TensorBoard(tmp_path / "board")
    board.record("train", 1, {"loss": 1.0})
    with monkeypatch.context() as full:
        full.setattr(board._writer, "add_scalar", refuse)
        full.setattr(observers, "write_whole", refuse)
        with pytest.raises(TemporaryObserverError, match=rf"{tmp_path / 'board'} cannot be written \(No space left"):
            board.record("train", 2, {"loss": 1.0})
        board.record("train", 3, {"loss": 1.0})
    board.record("train", 4, {"loss": 1.0})
    board.close()
    assert shown(tmp_path / "board") == [1, 4]
    assert all(path.name.startswith("events.") for path in (tmp_path / "board").iterdir())


def test_records_that_were_lost_to_the_end_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = TensorBoard(tmp_path)
    monkeypatch.setattr(observers, "write_whole", refuse)
    with pytest.raises(TemporaryObserverError):
        board.record("train", 1, {"loss": 1.0})
    board.record("train", 2, {"loss": 1.0})
    with pytest.raises(TrainerError, match="the last 2 records could not be written"):
        board.close()


def test_a_folder_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(TrainerError, match=r"file cannot be written .*leave report\.tensorboard out"):
        TensorBoard(tmp_path / "file")
