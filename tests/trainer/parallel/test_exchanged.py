"""Gradients that the engines would not exchange, and weights that they would not gather: refused in words."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import TrainerError, World


class Hidden:
    """What torch does not look into."""

    def __init__(self, scores: torch.Tensor) -> None:
        self.scores = scores


@dataclass
class Shown:
    """What torch looks into."""

    scores: torch.Tensor


class Answering(nn.Module):
    def __init__(self, answer: type[Hidden] | type[Shown]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.answer = nn.Linear(2, 3), nn.Linear(3, 2), answer

    def forward(self, x: torch.Tensor) -> Hidden | Shown:
        return self.answer(self.last(torch.tanh(self.first(x))))


class Holder(nn.Module):
    """Has no forward: whoever holds it runs what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)


class Part(Holder):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


class Nested(nn.Module):
    """Lists in a list, a module without a forward in a list, and a part of a block that is run around its forward."""

    def __init__(self, goes_around: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stages = nn.ModuleList(nn.ModuleList(nn.Linear(2, 2) for _ in range(2)) for _ in range(2))
        self.holders = nn.ModuleList([Part() if goes_around else Holder()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage in self.stages:
            for layer in stage:
                x = x + torch.tanh(layer(x))
        for holder in self.holders:
            x = holder.line(x)
        return x


class Twofold(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).double())


class Thawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(2, 3), nn.Linear(3, 2)
        self.first.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Unshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.LazyLinear(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def square(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    scores = model(batch["x"])
    scores = getattr(scores, "scores", scores)
    return (scores.float() - 0.5).square().sum(), len(batch["x"])


def add_weights(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    total, count = square(model, batch)
    return total + sum(one.square().sum() for one in model.parameters()), count


def thaw(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """Unfreezes the first layer before the step that begins with row 7."""
    if (batch["number"] >= 7).any():
        getattr(model, "module", model).first.requires_grad_(True)
    return square(model, batch)


def train(world: World, make: Callable[[], nn.Module], zero: int, loss: Callable[..., Any] = square) -> Any:
    """The parameters, or what the refusal says."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"parallel": {"zero": zero}, "loss": loss, "optimizer": None}
        model = make()
        options["optimizer"] = partial(sgd_of, model) if zero == 0 else sgd
        try:
            with make_trainer(world, folder, rows(world, shuffle=False), model, **options) as trainer:
                trainer.train()
        except TrainerError as exc:
            return str(exc)
        return [getattr(one, "full_tensor", one.clone)().flatten().tolist() for one in model.parameters()]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def sgd_of(model: nn.Module, parameters: Any) -> torch.optim.Optimizer:
    """Over frozen parameters too."""
    return sgd(model.parameters())


@pytest.mark.parametrize(
    ("make", "zero", "loss", "words"),
    [
        (partial(Answering, Hidden), 1, square, ["first.weight, first.bias", "were not exchanged", "dataclasses"]),
        (partial(Answering, Hidden), 3, square, ["weights in shards", "finds no tensors", "dataclasses"]),
        (partial(Nested, True), 3, square, ["used outside", "parallel.blocks"]),
        (Twofold, 1, square, ["'first.weight' is float32, 'last.weight' is float64", "parallel.zero=0"]),
        (Unshaped, 0, square, ["line.weight, line.bias have no shape", "on a batch"]),
        (Thawing, 0, thaw, ["first.weight, first.bias were frozen", "new trainer"]),
        (partial(Answering, Shown), 3, add_weights, ["is a DTensor", "weight_decay"]),
    ],
    ids=["hidden-1", "hidden-3", "around", "formats", "lazy", "thawed", "weights"],
)
def test_what_would_train_wrong_is_refused_in_words(
    make: Callable[[], nn.Module], zero: int, loss: Callable[..., Any], words: list[str]
) -> None:
    for told in run_ranks(train, 2, make, zero, loss):
        assert all(word in told for word in words), told


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            partial(Answering, Shown),
            marks=pytest.mark.skipif(torch.__version__ < (2, 13), reason="refused: older ones look into no dataclass"),
        ),
        Nested,
    ],
    ids=["dataclass", "lists in lists"],
)
def test_what_looks_like_it_trains_as_on_one_rank(make: Callable[[], nn.Module]) -> None:
    expected = run_ranks(train, 1, make, 0)[0]
    for zero in (1, 3):
        for found in run_ranks(train, 2, make, zero):
            for mine, right in zip(found, expected, strict=True):
                assert mine == pytest.approx(right, abs=1e-6)
