"""What one rank changes alone, as an observer would: told before a weight changes, and named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, add_up, make_trainer, rows
from torch import nn

from penstock.trainer import Callbacks, Evaluation, StepRecord, TrainerConfigError, TrainerError, World


class Changing(Callbacks):
    def __init__(self, change: Callable[[Any], None]) -> None:
        self.trainer: Any = None
        self._change = change

    def on_step(self, record: StepRecord) -> None:
        if record.step == 2:
            self._change(self.trainer)


def decay_more(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["weight_decay"] = 0.5


def other_betas(trainer: Any) -> None:
    trainer.optimizer.param_groups[0]["betas"] = (0.5, 0.9)


def freeze(trainer: Any) -> None:
    trainer.parallel.inner[1].requires_grad_(False)


def nothing(trainer: Any) -> None:
    pass


def spell_otherwise(trainer: Any) -> None:
    """The same settings by other types, as of a rank that read them from a file."""
    values = {"weight_decay": np.float64(0.01), "betas": [0.9, 0.999], "eps": np.float64(1e-8)}
    trainer.optimizer.param_groups[0].update(values)


def train(world: World, folder: str, change: Callable[[Any], None], zero: int) -> tuple[int, str]:
    torch.manual_seed(0)
    observer = Changing(change)
    options: dict[str, Any] = {"model": nn.Sequential(Line(), nn.Linear(2, 2)), "observers": [observer]}
    options["optimizer"] = lambda parameters: torch.optim.AdamW(parameters, lr=0.1)
    options["parallel"] = {"zero": zero, "unused_parameters": zero == 0}
    with make_trainer(world, folder, **options) as trainer:
        observer.trainer = trainer
        try:
            trainer.train()
        except TrainerError as exc:
            return trainer.progress.step, str(exc)
        return trainer.progress.step, ""


@pytest.mark.parametrize(
    ("change", "zero", "told"),
    [
        (decay_more, 0, "'weight_decay' of the optimizer's group 0 is 0.5 on rank 0 and 0.01 on rank 1"),
        (other_betas, 2, "'betas' of the optimizer's group 0 is (0.5, 0.9) on rank 0 and (0.9, 0.999) on rank 1"),
        (freeze, 0, "'frozen parameters' of the optimizer's group 0 is [2, 3] on rank 0 and [] on rank 1"),
        (nothing, 0, ""),
        (nothing, 3, ""),
        (spell_otherwise, 0, ""),
    ],
)
def test_what_an_observer_changes_of_the_updates_on_rank_0_alone_is_told_on_all(
    tmp_path: Path, change: Callable[[Any], None], zero: int, told: str
) -> None:
    for step, found in run_ranks(train, 3, str(tmp_path), change, zero):
        assert step == (2 if told else 4)
        assert told in found
        assert bool(told) == bool(found)


@pytest.mark.parametrize("change", [decay_more, other_betas, freeze])
def test_alone_it_has_its_effect(world: World, tmp_path: Path, change: Callable[[Any], None]) -> None:
    assert train(world, str(tmp_path), change, 0) == (4, "")


def scale(trainer: Any) -> None:
    with torch.no_grad():
        trainer.parallel.inner[1].weight.mul_(1.01)


def save_or_evaluate(world: World, folder: str, change: Callable[[Any], None], evaluates: bool) -> tuple[int, str]:
    torch.manual_seed(0)
    observer = Changing(change)
    options: dict[str, Any] = {"model": nn.Sequential(Line(), nn.Linear(2, 2)), "observers": [observer]}
    if evaluates:
        options |= {"evaluation": Evaluation(batches=rows(world, "pad"), metrics=add_up), "evaluate": {"every": 3}}
    else:
        options["checkpoint"] = {"every_steps": 3}
    with make_trainer(world, folder, **options) as trainer:
        observer.trainer = trainer
        try:
            trainer.train()
        except TrainerError as exc:
            return trainer.progress.step, str(exc)
        return trainer.progress.step, ""


@pytest.mark.parametrize("evaluates", [False, True])
def test_weights_that_an_observer_changes_on_rank_0_alone_are_neither_evaluated_nor_saved(
    tmp_path: Path, evaluates: bool
) -> None:
    for step, found in run_ranks(save_or_evaluate, 2, str(tmp_path), scale, evaluates):
        assert step == 3
        assert "different models: the norm of 1.weight is" in found
    assert not list(tmp_path.glob("checkpoints/step-*"))
    assert run_ranks(save_or_evaluate, 2, str(tmp_path / "well"), nothing, evaluates) == [(4, "")] * 2


APART: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "steps": ({"steps": 4}, {"steps": 5}, "steps is 4 on rank 0 and 5 on rank 1"),
    "clipping": ({}, {"step": {"clip_norm": 1.0}}, "step.clip_norm is None on rank 0 and 1.0 on rank 1"),
    "zero": ({}, {"parallel": {"zero": 2}}, "parallel.zero is 0 on rank 0 and 2 on rank 1"),
    "schedule": ({}, {"schedule": {"shape": "linear"}}, "schedule.shape is 'constant' on rank 0 and 'linear'"),
    "average": ({}, {"ema": {"decay": 0.5}}, "ema.decay is None on rank 0 and 0.5 on rank 1"),
    "format": ({}, {"precision": {"dtype": "bf16"}}, "precision.dtype is 'fp32' on rank 0 and 'bf16' on rank 1"),
    "saves": ({"checkpoint": {"every_steps": 2}}, {}, "checkpoint.every_steps is 2 on rank 0 and 0 on rank 1"),
    "start": ({"init_from": "run"}, {}, "init_from is 'given' on rank 0 and None on rank 1"),
    "own": ({"report": {"quiet": True}, "seed": 1}, {"stall_timeout_s": 30.0, "report": {"every": 3}}, ""),
}


def give_options_apart(world: World, folder: str) -> dict[str, str]:
    found = {}
    for name, options in APART.items():
        try:
            with make_trainer(world, f"{folder}/{name}", **options[world.rank]) as trainer:
                trainer.train()
            found[name] = ""
        except TrainerConfigError as exc:
            found[name] = str(exc)
    evaluation = None if world.rank else Evaluation(batches=rows(world, "pad"), metrics=add_up)
    try:
        make_trainer(world, f"{folder}/evaluation", evaluation=evaluation)
    except TrainerConfigError as exc:
        found["evaluation"] = str(exc)
    return found


def test_options_that_differ_between_ranks_are_refused_by_name(tmp_path: Path) -> None:
    for found in run_ranks(give_options_apart, 2, str(tmp_path)):
        for name, (_, _, told) in APART.items():
            assert told in found[name]
            assert bool(told) == bool(found[name])
        assert "evaluation is 'one' on rank 0 and None on rank 1" in found["evaluation"]


def make_apart(world: World, folder: str, how: str, zero: int) -> str:
    def make(parameters: Any) -> torch.optim.Optimizer:
        if how == "class" and world.rank == 1:
            return torch.optim.Adagrad(parameters, lr=0.1)
        some = list(parameters)[: 1 if how == "parameters" and world.rank == 1 else None]
        return torch.optim.SGD(some, lr=0.2 if how == "lr" and world.rank == 1 else 0.1)

    options: dict[str, Any] = {"parallel": {"zero": zero}, "optimizer": make}
    with make_trainer(world, folder, **options) as trainer:
        try:
            trainer.train()
        except TrainerError as exc:
            return str(exc)
        return ""


@pytest.mark.parametrize("zero", [0, 2])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("lr", "'lr' of the optimizer's group 0 is 0.1 on rank 0 and 0.2 on rank 1"),
        ("class", "'class' of the optimizer's group 0 is SGD on rank 0 and Adagrad on rank 1"),
        ("parameters", "'parameters' of the optimizer's group 0 is 2 on rank 0 and 1 on rank 1"),
    ],
)
def test_optimizers_that_ranks_make_differently_are_told(tmp_path: Path, how: str, told: str, zero: int) -> None:
    for found in run_ranks(make_apart, 2, str(tmp_path), how, zero):
        assert told in found
