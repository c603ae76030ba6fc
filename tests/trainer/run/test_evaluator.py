"""Evaluations that are due: made up for after a stop, and watched outside of training."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import Ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import Callbacks, Evaluation, StepRecord, TrainerConfigError, World
from penstock.trainer.run import evaluator

STALL_TIMEOUT_S = 6.0


class StoppedAfter(Callbacks):
    """Gets SIGTERM after a step, so that training stops after the next."""

    def __init__(self, step: int) -> None:
        self._step = step

    def on_step(self, record: StepRecord) -> None:
        if record.step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


def size_of_outputs(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {"loss": (model(batch["x"]).square().sum(), len(batch["x"]))}


def train(world: World, folder: Path, *observers: Callbacks, steps: int = 8) -> Any:
    options: dict[str, Any] = {"evaluate": {"every": 3, "best": "loss"}, "checkpoint": {"every_steps": 4}}
    options |= {"evaluation": Evaluation(batches=rows(world), metrics=size_of_outputs), "observers": observers}
    with make_trainer(world, str(folder), steps=steps, **options) as trainer:
        return trainer.train()


def evaluations(folder: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["kind"] == "evaluate"]


@pytest.mark.slow
@pytest.mark.parametrize("last", [3, 5, 6, 8])
def test_an_evaluation_that_a_stop_left_undone_is_made_by_the_run_that_resumes(
    world: World, tmp_path: Path, last: int
) -> None:
    whole = train(world, tmp_path / "whole")
    stopped = train(world, tmp_path / "stopped", StoppedAfter(last - 1))
    assert (stopped.steps, stopped.stopped_early) == (last, True)
    resumed = train(world, tmp_path / "stopped")
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "whole")
    assert (resumed.best, resumed.best_step, resumed.metrics) == (whole.best, whole.best_step, whole.metrics)


@pytest.mark.slow
def test_so_is_that_of_the_last_step_where_nothing_else_is_left_to_do(world: World, tmp_path: Path) -> None:
    whole = train(world, tmp_path / "whole", steps=6)
    train(world, tmp_path / "stopped", StoppedAfter(5), steps=6)
    assert [step for step, _ in evaluations(tmp_path / "stopped")] == [3]
    resumed = train(world, tmp_path / "stopped", steps=6)
    assert (resumed.metrics, resumed.best_step) == (whole.metrics, whole.best_step)
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "whole")


def train_to_the_end_of_an_epoch(
    world: World,
    folder: Path,
    *observers: Callbacks,
    steps: int,
    size: int = 6,
    save_every: int = 4,
    metrics: Any = size_of_outputs,
) -> Any:
    evaluation = Evaluation(batches=rows(world), metrics=metrics)
    options: dict[str, Any] = {"evaluation": evaluation, "evaluate": {"best": "loss"}, "observers": observers}
    options |= {"checkpoint": {"every_steps": save_every, "keep_best": 1}}
    options |= {"loader": rows(world, size=size, shuffle=True)}
    with make_trainer(world, str(folder), steps=steps, **options) as trainer:
        return trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize("broken_at", [None, 2, 4, 6])
def test_an_epoch_that_ends_with_the_last_step_is_counted_and_evaluated(
    world: World, tmp_path: Path, broken_at: int | None
) -> None:
    if broken_at is not None:
        train_to_the_end_of_an_epoch(world, tmp_path, steps=broken_at)
    summary = train_to_the_end_of_an_epoch(world, tmp_path, steps=8)
    assert (summary.steps, summary.epochs, summary.best_step) == (8, 2, 8)
    assert [step for step, _ in evaluations(tmp_path)] == [4, 8]
    assert summary.metrics == {"loss": evaluations(tmp_path)[-1][1]}
    more = train_to_the_end_of_an_epoch(world, tmp_path, steps=13)
    assert (more.steps, more.epochs) == (13, 3)
    assert [step for step, _ in evaluations(tmp_path)] == [4, 8, 12]


@pytest.mark.slow
def test_so_is_one_whose_last_step_a_signal_came_before(world: World, tmp_path: Path) -> None:
    stopped = train_to_the_end_of_an_epoch(world, tmp_path, StoppedAfter(7), steps=8)
    assert (stopped.steps, stopped.stopped_early) == (8, True)
    summary = train_to_the_end_of_an_epoch(world, tmp_path, steps=8)
    assert (summary.steps, summary.epochs, summary.best_step) == (8, 2, 8)
    assert [step for step, _ in evaluations(tmp_path)] == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("save_every", [3, 4])  # with 4 the save before the epoch's end is the last one
def test_so_is_one_that_ends_while_a_signal_asks_to_stop(world: World, tmp_path: Path, save_every: int) -> None:
    whole = train_to_the_end_of_an_epoch(world, tmp_path / "whole", steps=13, save_every=save_every)
    stopped = train_to_the_end_of_an_epoch(
        world, tmp_path / "stopped", StoppedAfter(4), steps=13, save_every=save_every
    )
    assert (stopped.steps, stopped.stopped_early, stopped.metrics) == (4, True, {})
    resumed = train_to_the_end_of_an_epoch(world, tmp_path / "stopped", steps=13, save_every=save_every)
    assert evaluations(tmp_path / "stopped") == evaluations(tmp_path / "whole")
    assert (resumed.best, resumed.best_step, resumed.metrics) == (whole.best, whole.best_step, whole.metrics)


def stop_within(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGTERM)
    return size_of_outputs(model, batch)


@pytest.mark.parametrize("size", [5, 6])  # the epoch's last step is saved by a stop; on time
@pytest.mark.parametrize("steps", [6, 12])
def test_so_is_one_whose_evaluation_a_signal_broke_off(world: World, tmp_path: Path, steps: int, size: int) -> None:
    whole = train_to_the_end_of_an_epoch(world, tmp_path / "whole", steps=steps, size=size)
    train_to_the_end_of_an_epoch(world, tmp_path / "run", steps=steps, size=size, metrics=stop_within)
    assert evaluations(tmp_path / "run") == []
    summary = train_to_the_end_of_an_epoch(world, tmp_path / "run", steps=steps, size=size)
    assert evaluations(tmp_path / "run") == evaluations(tmp_path / "whole")
    assert (summary.steps, summary.epochs, summary.best_step) == (whole.steps, whole.epochs, whole.best_step)


@pytest.mark.slow
def test_an_epoch_of_another_length_since_the_checkpoint_loses_no_batch(world: World, tmp_path: Path) -> None:
    train_to_the_end_of_an_epoch(world, tmp_path, steps=2)
    summary = train_to_the_end_of_an_epoch(world, tmp_path, steps=3, size=8)
    assert (summary.steps, summary.epochs, evaluations(tmp_path)) == (3, 0, [])
    assert train_to_the_end_of_an_epoch(world, tmp_path, steps=9, size=8).samples > 23


def test_a_best_metric_without_a_batch_is_told_so(world: World, tmp_path: Path) -> None:
    nothing = Evaluation(batches=[], metrics=size_of_outputs)
    with (
        make_trainer(world, str(tmp_path), evaluation=nothing, evaluate={"best": "loss"}) as trainer,
        pytest.raises(TrainerConfigError, match="'loss' is no metric of the evaluation; no rank had a batch"),
    ):
        trainer.evaluate()


def evaluate_and_hang(world: World, folder: str) -> None:
    def hang(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
        time.sleep(600.0 if world.rank == 1 else 0.0)
        return size_of_outputs(model, batch)

    evaluation = Evaluation(batches=rows(world), metrics=hang)
    with make_trainer(world, folder, evaluation=evaluation, stall_timeout_s=STALL_TIMEOUT_S) as trainer:
        trainer.evaluate()


def test_a_rank_that_hangs_in_an_evaluation_outside_of_training_is_named_and_ends_all(tmp_path: Path) -> None:
    outcomes = Ranks(evaluate_and_hang, 2, str(tmp_path)).join(60)
    assert all(outcome.exit_code not in (None, 0) for outcome in outcomes)
    assert "rank 1 is stalled in evaluate" in (tmp_path / "stalls" / "stall-rank-0.txt").read_text()


@pytest.mark.parametrize(("batches", "told"), [(0, 1), (1, 0)])
def test_evaluations_that_measure_nothing_are_noted_once(world: World, tmp_path: Path, batches: int, told: int) -> None:
    evaluation = Evaluation(batches=[{"x": torch.ones(3, 2)}] * batches, metrics=size_of_outputs)
    with make_trainer(world, str(tmp_path), evaluation=evaluation, evaluate={"every": 1}, steps=3) as trainer:
        trainer.train()
    records = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    notes = [record["note"] for record in records if record["kind"] == "note"]
    assert len([note for note in notes if "measured nothing" in note and "last_batch='partial'" in note]) == told


@pytest.mark.parametrize("every", [1, None])
def test_evaluations_that_take_much_of_a_run_are_noted_once_with_their_share_and_what_to_set(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int | None
) -> None:
    monkeypatch.setattr(evaluator, "_SHORT_S", 0.0)
    monkeypatch.setattr(evaluator, "_MUCH", 0.0)
    options: dict[str, Any] = {"evaluate": {"every": every}, "steps": None, "epochs": 5}
    options["evaluation"] = Evaluation(batches=rows(world), metrics=size_of_outputs)
    with make_trainer(world, str(tmp_path), **options) as trainer:
        trainer.train()
    found = [note for note in notes_of(tmp_path) if "evaluation takes" in note]
    now = "now 1" if every else "now after each epoch"
    assert len(found) == 1
    assert re.fullmatch(
        rf"evaluation takes \d+% of the time so far \(3 evaluations of .* s\): .*evaluate\.every=STEPS \({now}\).*",
        found[0],
    )


def notes_of(folder: Path) -> list[str]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [line["note"] for line in lines if "note" in line]


@pytest.mark.parametrize(("dtype", "is_told"), [("bf16", True), ("fp32", False)])
def test_bf16_on_a_cpu_is_noted(world: World, tmp_path: Path, dtype: str, is_told: bool) -> None:
    with make_trainer(world, str(tmp_path), steps=1, precision={"dtype": dtype}) as trainer:
        trainer.train()
    assert sum("precision.dtype='bf16'" in note for note in notes_of(tmp_path)) == is_told
