"""Parameters by the patterns of their names: settings of their own, at every zero stage, or frozen."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from torch import nn

from penstock.trainer import RecipeError, World
from penstock.trainer.__main__ import main, train_recipe
from penstock.trainer.recipes.parameter_groups import freeze_parameters, read_groups, split_parameters
from penstock.trainer.recipes.recipe import Recipe, build_recipe, format_toml


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(2, 2)
        self.layers = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.head = nn.Linear(2, 2)
        for name, parameter in self.named_parameters():
            nn.init.constant_(parameter, 0.1 if name.endswith("bias") else 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.stem, *self.layers, self.head):
            x = layer(x)
        return x


KEPT: list[nn.Module] = []


def make_net() -> Net:
    KEPT[:] = [Net()]
    return KEPT[0]  # type: ignore[return-value]


def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model(batch["x"]).float().square().sum(), len(batch["x"])


def batches() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.ones(2, 2)}] * 3


def tables(folder: Path, groups: list[dict[str, Any]], zero: int = 0) -> dict[str, Any]:
    here = "test_parameter_groups"
    return {
        "model": {"use": f"{here}:make_net"},
        "optimizer": {"use": "torch.optim:SGD", "args": {"lr": 0.1}, "groups": groups},
        "loss": {"use": f"{here}:loss"},
        "data": {"use": f"{here}:batches"},
        "trainer": {
            "steps": 3,
            "output_dir": str(folder),
            "precision": {"dtype": "fp32"},
            "parallel": {"zero": zero},
            "report": {"quiet": True},
            "schedule": {"warmup_steps": 2},
        },
    }


GROUPS: list[dict[str, Any]] = [
    {"match": "stem.*", "freeze": True},
    {"match": ["*.bias"], "lr": 0.0},
    {"match": ["layers.0.*", "head.*"], "lr": 0.2, "weight_decay": 0.5},
]


def train(world: World, folder: str, zero: int) -> dict[str, list[float]]:
    train_recipe(build_recipe(tables(Path(folder), GROUPS, zero)), world)
    named = KEPT[0].named_parameters()
    return {name: getattr(one, "full_tensor", lambda one=one: one)().flatten().tolist() for name, one in named}


def expect() -> dict[str, list[float]]:
    net = Net()
    weights = {name: parameter for name, parameter in net.named_parameters() if name.endswith("weight")}
    own = {"layers.0.weight": (0.2, 0.5), "head.weight": (0.2, 0.5), "layers.1.weight": (0.1, 0.0)}
    for factor in (0.5, 1.0, 1.0):
        net.zero_grad()
        (loss(net, batches()[0])[0] / 2).backward()
        with torch.no_grad():
            for name, (rate, decay) in own.items():
                weights[name] -= factor * rate * (weights[name].grad + decay * weights[name])
    return {name: parameter.flatten().tolist() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize("zero", [0, 3])
def test_each_group_has_settings_of_its_own_and_follows_the_schedule(tmp_path: Path, zero: int) -> None:
    expected = expect()
    for found in run_ranks(train, 2, str(tmp_path), zero):
        assert found.keys() == expected.keys()
        for name in expected:
            assert found[name] == pytest.approx(expected[name], abs=1e-6), name
        assert found["stem.weight"] == [0.5] * 4


def recipe(folder: Path, groups: list[dict[str, Any]]) -> Recipe:
    return build_recipe(tables(folder, groups))


def test_the_first_group_that_fits_counts_and_the_rest_is_as_without(tmp_path: Path) -> None:
    net = Net()
    groups = read_groups("optimizer.groups", GROUPS)
    freeze_parameters(net, groups)
    split = split_parameters(net, groups)
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    assert [[names[id(parameter)] for parameter in group["params"]] for group in split] == [
        ["layers.1.weight"],
        ["layers.0.bias", "layers.1.bias", "head.bias"],
        ["layers.0.weight", "head.weight"],
    ]
    assert [{key: value for key, value in group.items() if key != "params"} for group in split] == [
        {},
        {"lr": 0.0},
        {"lr": 0.2, "weight_decay": 0.5},
    ]


def test_groups_read_back_from_what_the_dry_run_prints(tmp_path: Path) -> None:
    made = recipe(tmp_path, GROUPS)
    assert build_recipe(tomllib.loads(format_toml(made.describe()))).groups == made.groups


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"match": "*.bias", "weigth_decay": 0.0}], ["optimizer.groups[0]", "weigth_decay", "weight_decay"]),
        ([{"weight_decay": 0.0}], ["optimizer.groups[0].match=None", "*.bias"]),
        ([{"match": [], "lr": 1.0}], ["optimizer.groups[0].match=[]"]),
        ([{"match": "*"}], ["optimizer.groups[0]", "freeze = true"]),
        ([{"match": "*", "freeze": True, "lr": 1.0}], ["optimizer.groups[0]", "lr"]),
        ([{"match": "*", "freeze": "yes"}], ["optimizer.groups[0].freeze='yes'"]),
        ({"match": "*"}, ["optimizer.groups=", "[[optimizer.groups]]"]),
    ],
)
def test_bad_groups_are_refused_by_name(tmp_path: Path, groups: Any, words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        build_recipe(tables(tmp_path, groups)).check()
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"match": "stem.wieght", "freeze": True}], ["groups[0].match='stem.wieght'", "Net", "stem.weight"]),
        ([{"match": ["*"], "freeze": True}], ["groups[0] freeze every parameter of Net"]),
    ],
)
def test_patterns_are_checked_against_the_model(groups: list[dict[str, Any]], words: list[str]) -> None:
    with pytest.raises(RecipeError) as caught:
        freeze_parameters(Net(), read_groups("groups", groups))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.slow
def test_the_command_line_trains_a_recipe_with_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(format_toml(tables(tmp_path / "run", GROUPS)))
    assert main([str(path)]) == 0
    assert KEPT[0].get_parameter("stem.weight").flatten().tolist() == [0.5] * 4
