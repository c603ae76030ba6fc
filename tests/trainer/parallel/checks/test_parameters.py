"""A model that is changed after its trainer was made: told by the parameters that came or went."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import Ranks
from small_trainers import Line, make_trainer
from torch import nn
from torch.nn.utils import parametrizations, prune

from penstock.trainer import Callbacks, StepRecord, TrainerConfigError, World
from penstock.trainer.parallel.precision import local_part

Change = Callable[[nn.Sequential], Any]


class Changing(Callbacks):
    def __init__(self, change: Change, model: nn.Sequential) -> None:
        self._change, self._model = change, model

    def on_step(self, record: StepRecord) -> None:
        if record.step == 2:
            self._change(self._model)


def train(world: World, folder: str, change: Change, zero: int, **options: Any) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(Line(), nn.Linear(2, 2))
    observers = [Changing(change, model)]
    with make_trainer(world, folder, model=model, observers=observers, parallel={"zero": zero}, **options) as trainer:
        trainer.train()
    return model


def replace_head(model: nn.Sequential) -> None:
    model[1] = nn.Linear(2, 2)


def replace_weight(model: nn.Sequential) -> None:
    model[1].weight = nn.Parameter(torch.ones(2, 2))


def append(model: nn.Sequential) -> None:
    model.append(nn.Linear(2, 2))


def normalise_weight(model: nn.Sequential) -> None:
    parametrizations.weight_norm(model[1])


def tie(model: nn.Sequential) -> None:
    model[1].weight = model[0].line.weight


def remove(model: nn.Sequential) -> None:
    del model[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (replace_head, r"1\.weight, 1\.bias came and 1\.weight, 1\.bias went"),
        (replace_weight, r"1\.weight came and 1\.weight went"),
        (append, r"2\.weight, 2\.bias came\."),
        (normalise_weight, r"1\.parametrizations\.weight\.original0, .* came and 1\.weight went"),
        (tie, r"parameters, 1\.weight went"),
        (remove, r"parameters, 1\.weight, 1\.bias went"),
    ],
)
def test_parameters_that_come_or_go_after_the_trainer_was_made_are_named(
    world: World, tmp_path: Path, change: Change, told: str, zero: int
) -> None:
    with pytest.raises(TrainerConfigError, match=f"changed after the trainer was made: .*{told}"):
        train(world, str(tmp_path), change, zero)


@pytest.mark.parametrize("zero", [0, 2])
def test_so_are_those_that_come_after_the_last_step_before_they_are_saved(
    world: World, tmp_path: Path, zero: int
) -> None:
    with pytest.raises(TrainerConfigError, match="changed after the trainer was made"):
        train(world, str(tmp_path), replace_head, zero, steps=2, checkpoint={"every_steps": 2})


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_modules_without_parameters_may_come_and_parameters_may_get_other_names(
    world: World, tmp_path: Path, zero: int
) -> None:
    whole = train(world, str(tmp_path / "whole"), lambda model: None, zero)
    changed = train(world, str(tmp_path / "more"), lambda model: model.append(nn.Identity()), zero)
    for one, other in zip(whole.parameters(), changed.parameters(), strict=True):
        assert torch.equal(local_part(one), local_part(other))
    if not zero:
        pruned = train(world, str(tmp_path / "pruned"), lambda model: prune.identity(model[1], "weight"), zero)
        assert torch.equal(pruned[1].weight_orig, whole[1].weight)


class MakesItsTeacher(nn.Sequential):
    """Makes a frozen part in the first forward, and with ``thaws`` trains it in the third."""

    def __init__(self, *, thaws: bool = False) -> None:
        super().__init__(Line())
        self.calls, self.thaws = 0, thaws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            self.teacher = Line().requires_grad_(False)
        if self.calls == 3 and self.thaws:
            self.teacher.requires_grad_(True)
        return self[0](x) - 0.5 * self.teacher(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_parameters_may_come_where_none_are_saved(world: World, tmp_path: Path, zero: int) -> None:
    def train_teacher(folder: str, **options: Any) -> torch.Tensor:
        model = MakesItsTeacher(thaws=options.pop("thaws", False))
        with make_trainer(world, str(tmp_path / folder), model=model, parallel={"zero": zero}, **options) as trainer:
            trainer.train()
        return local_part(model[0].line.weight)

    assert not torch.equal(train_teacher("frozen"), Line().line.weight)
    with pytest.raises(TrainerConfigError, match=r"teacher\.line\.weight, teacher\.line\.bias came\..*untrained"):
        train_teacher("thawed", thaws=True)
    with pytest.raises(TrainerConfigError, match=r"teacher\.line\.bias came\..*could not be resumed"):
        train_teacher("saved", checkpoint={"every_steps": 3})


class SwapsItsHead(nn.Sequential):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 3:
            self[1] = nn.Linear(2, 2)
        return super().forward(x)  # type: ignore[no-any-return]


def change_on_all(world: World, folder: str) -> str:
    model = SwapsItsHead(Line(), nn.Linear(2, 2))
    try:
        with make_trainer(world, folder, model=model, parallel={"unused_parameters": True}) as trainer:
            trainer.train()
    except TrainerConfigError as exc:
        return str(exc)
    return "trained"


def test_a_model_that_changes_itself_is_told_on_several_ranks(tmp_path: Path) -> None:
    outcomes = Ranks(change_on_all, 2, str(tmp_path)).join(60)
    told = [str(outcome.value) for outcome in outcomes]
    assert any("1.weight, 1.bias came" in one for one in told), told
