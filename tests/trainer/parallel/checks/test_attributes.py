"""What hangs on the parameters of a model is there after sharding, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small_trainers import make_trainer
from torch import nn

from penstock.trainer import TrainerConfigError, World, build_on_meta


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(getattr(self.b.weight, "scale", None))
        return self.b(self.a(x))


def mask(model: Two) -> None:
    model.a.weight.register_hook(lambda gradient: gradient * 0)


def mask_accumulated(model: Two) -> None:
    model.b.bias.register_post_accumulate_grad_hook(lambda parameter: None)


def hold(model: Two) -> None:
    model.tied = [model.a.weight]


def hold_deep(model: Two) -> None:
    model.b.tied = {"layers": ([model.a.bias],)}


def hold_as_attribute(model: Two) -> None:
    object.__setattr__(model, "tied", model.b.weight)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (mask, "'a.weight' has a hook by register_hook"),
        (mask_accumulated, "'b.bias' has a hook by register_post_accumulate_grad_hook"),
        (hold, "tied of Two holds the parameter 'a.weight' itself"),
        (hold_deep, "b.tied of Two holds the parameter 'a.bias' itself"),
        (hold_as_attribute, "tied of Two holds the parameter 'b.weight' itself"),
    ],
)
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_would_be_lost_with_the_parameters_that_shards_replace_is_refused(
    world: World, tmp_path: Path, zero: int, change: Callable[[Two], None], said: str
) -> None:
    model = Two()
    change(model)
    options: dict[str, Any] = {"model": model, "parallel": {"zero": zero}}
    if zero:
        with pytest.raises(TrainerConfigError, match=f"parallel.zero={zero} .*{said}.*parallel.zero=0"):
            make_trainer(world, str(tmp_path), **options)
    else:
        with make_trainer(world, str(tmp_path), **options) as trainer:
            trainer.train()


@pytest.mark.parametrize("build", [Two, lambda: build_on_meta(Two)])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_attributes_of_parameters_reach_the_optimizer_and_forward(
    world: World, tmp_path: Path, zero: int, build: Callable[[], Two]
) -> None:
    model = build()
    model.a.bias.no_decay = True
    model.b.weight.scale = 3

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
        for one in parameters:
            groups[hasattr(one, "no_decay")].append(one)
        assert list(map(len, groups.values())) == [1, 3]
        return torch.optim.SGD([{"params": one} for one in groups.values()], lr=0.1)

    with make_trainer(world, str(tmp_path), model=model, optimizer=optimizer, parallel={"zero": zero}) as trainer:
        trainer.train()
    assert model.seen[-4:] == [3] * 4


class Recurrent(nn.Module):
    """Torch's recurrent layers hold their weights in a list of their own, and a module may hold another one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.line = nn.LSTM(2, 4, batch_first=True), nn.Linear(4, 2)
        self.also = [self.line]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.also[0](self.layer(x[:, None])[0][:, 0])


@pytest.mark.parametrize("zero", [1, 3])
def test_modules_that_others_hold_and_recurrent_layers_train_as_unsharded(
    world: World, tmp_path: Path, zero: int
) -> None:
    def train(zero: int) -> torch.Tensor:
        model = Recurrent()
        with make_trainer(world, str(tmp_path / f"{zero}"), model=model, parallel={"zero": zero}) as trainer:
            trainer.train()
            return torch.cat(
                [getattr(one, "full_tensor", lambda one=one: one)().flatten() for one in model.parameters()]
            )

    assert torch.allclose(train(zero), train(0), atol=1e-6)
