"""Whoever looks on may fail without ending the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_trainers import Line, rows, square

from penstock.trainer import DistributedTrainer, TrainerConfig, TrainerConfigError, World
from penstock.trainer.options import build_config


class Broken:
    """Raises at step 2."""

    def __init__(self, error: BaseException, at_close: Exception | None = None) -> None:
        self.error, self.at_close = error, at_close
        self.calls: list[int] = []
        self.closed = 0

    def record(self, kind: str, step: int, values: Any) -> None:
        self.calls.append(step)
        if step == 2:
            raise self.error

    def close(self) -> None:
        self.closed += 1
        if self.at_close is not None:
            raise self.at_close


def make(world: World, folder: Path, *observers: Any) -> DistributedTrainer:
    values = {
        "steps": 4,
        "output_dir": str(folder),
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True, "every": 1},
    }
    config = build_config(TrainerConfig, values)
    optimizer = build_optimizer
    return DistributedTrainer(Line(), optimizer, rows(world), config, loss=square, observers=observers, world=world)


def build_optimizer(parameters: Any) -> Any:
    from torch.optim import SGD

    return SGD(parameters, lr=0.1)


def test_an_observer_that_raises_is_noted_once_and_left_out_and_the_run_goes_on(world: World, tmp_path: Path) -> None:
    broken, sound = Broken(ValueError("no connection")), Broken(ValueError("never"))
    sound.error = RuntimeError("also")
    with make(world, tmp_path, broken, sound) as trainer:
        assert trainer.train().steps == 4
    assert max(broken.calls) == 2
    assert broken.closed == sound.closed == 1
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    notes = [record["note"] for record in records if record["kind"] == "note" and "observer" in record["note"]]
    assert notes == [
        "observer Broken raised and gets no more records: ValueError: no connection",
        "observer Broken raised and gets no more records: RuntimeError: also",
    ]
    assert [record["step"] for record in records if record["kind"] == "train"] == [1, 2, 3, 4]


def test_an_observer_that_fails_to_close_hides_no_result(world: World, tmp_path: Path) -> None:
    observer = Broken(ValueError(), at_close=OSError("gone"))
    with make(world, tmp_path, observer) as trainer:
        trainer.train()
    assert observer.closed == 1


def test_an_interrupt_in_an_observer_still_interrupts(world: World, tmp_path: Path) -> None:
    with make(world, tmp_path, Broken(KeyboardInterrupt())) as trainer, pytest.raises(KeyboardInterrupt):
        trainer.train()


@pytest.mark.parametrize("folder", ["s3://bucket/run", "gs://bucket", Path("s3://bucket/run"), "file:///tmp/run"])
def test_an_output_folder_that_is_a_url_is_refused_by_name(folder: Any) -> None:
    with pytest.raises(TrainerConfigError, match=r"output_dir='[a-z0-9]+:/.*is not a path"):
        TrainerConfig(steps=1, output_dir=folder)
    TrainerConfig(steps=1, output_dir="runs/lr:0.1/a")
