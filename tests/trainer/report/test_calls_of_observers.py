"""Calls of all ranks that an observer makes on rank 0 alone, and calls that come after the trainer was closed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_ranks
from small_trainers import add_up, make_trainer, rows

from penstock.trainer import Callbacks, CheckpointError, Evaluation, StepRecord, TrainerError, World


class Calling(Callbacks):
    def __init__(self, call: str) -> None:
        self.trainer: Any = None
        self._call = call

    def on_step(self, record: StepRecord) -> None:
        if record.step == 2:
            getattr(self.trainer, self._call)()


def train(world: World, folder: str, call: str, zero: int = 0) -> tuple[int, list[str]]:
    observer = Calling(call)
    options: dict[str, Any] = {"observers": [observer], "checkpoint": {"every_steps": 3}, "stall_timeout_s": 10}
    evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
    with make_trainer(world, folder, evaluation=evaluation, parallel={"zero": zero}, **options) as trainer:
        observer.trainer = trainer
        steps = trainer.train().steps
    records = map(json.loads, (Path(folder) / "metrics.jsonl").read_text().splitlines())
    return steps, [record["note"] for record in records if record["kind"] == "note"]


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize("call", ["evaluate", "train", "close"])
def test_a_call_of_all_ranks_by_an_observer_drops_it_and_training_goes_on(tmp_path: Path, call: str, zero: int) -> None:
    for steps, notes in run_ranks(train, 2, str(tmp_path), call, zero):
        assert steps == 4
        assert any(f"TrainerError: an observer calls {call}()" in note for note in notes), notes


@pytest.mark.slow
def test_alone_an_observer_may_evaluate_and_not_train_or_close(world: World, tmp_path: Path) -> None:
    assert train(world, str(tmp_path / "evaluate"), "evaluate") == (4, [])
    for call in ("train", "close"):
        steps, notes = train(world, str(tmp_path / call), call)
        assert steps == 4
        assert f"an observer calls {call}()" in notes[0]


@pytest.mark.parametrize("every_steps", [0, 2])
def test_training_after_closing_is_refused(world: World, tmp_path: Path, every_steps: int) -> None:
    trainer = make_trainer(world, str(tmp_path), checkpoint={"every_steps": every_steps})
    trainer.close()
    trainer.close()
    with pytest.raises(TrainerError, match=r"train\(\) comes after close\(\)"):
        trainer.train()


def test_after_closing_an_evaluation_counts_and_saves_nothing(world: World, tmp_path: Path) -> None:
    def evaluated(folder: str, **options: Any) -> Callable[[], Any]:
        evaluation = Evaluation(batches=rows(world, "pad"), metrics=add_up)
        trainer = make_trainer(world, str(tmp_path / folder), evaluation=evaluation, **options)
        trainer.close()
        return trainer.evaluate  # type: ignore[no-any-return]

    assert evaluated("plain", checkpoint={"every_steps": 2})()["number"] == 12.0
    best: dict[str, Any] = {"evaluate": {"best": "number"}, "checkpoint": {"keep_best": 1, "best": "max"}}
    with pytest.raises(CheckpointError, match=r"step 0 cannot be saved .* closed"):
        evaluated("best", **best)()
