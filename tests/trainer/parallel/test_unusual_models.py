"""Models, losses and optimizers that the engines take only in part: right, or refused by name."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import DistributedTrainer, StallError, TrainerConfig, TrainerConfigError, World
from penstock.trainer.options import build_config


class Normed(nn.Module):
    """Batch norms in blocks and outside, with and without parameters."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 4)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, affine=affine), nn.Tanh()) for affine in (True, False)
        )
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(self.norm(x))


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x) * self.scale


class Tied(nn.Module):
    """Blocks that share a weight with one another, with the first layer, or are one block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(2, 2)
        self.blocks = nn.ModuleList(nn.Linear(2, 2) for _ in range(3))
        if how == "blocks":
            self.blocks[1].weight = self.blocks[0].weight
        elif how == "first":
            self.blocks[2].weight = self.first.weight
        else:
            self.blocks[1] = self.blocks[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


class Looked(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self, sparse: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(30, 2, sparse=sparse)
        self.line = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.table((x[:, 0] * 23).round().long() // 3))  # rows come several times


class TwoWays(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line, self.never = nn.Linear(2, 2), nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)

    def score(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def square(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return (model(batch["x"]).float() - 0.5).square().sum(), len(batch["x"])


def score(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return model.score(batch["x"]).square().sum(), len(batch["x"])


def score_inside(model: Any, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    return score(getattr(model, "module", model), batch)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def build(
    world: World,
    model: nn.Module,
    folder: str,
    options: dict[str, Any],
    loss: Callable[..., Any] = square,
    optimizer: Callable[..., Any] = sgd,
) -> DistributedTrainer:
    values = {
        "steps": 4,
        "output_dir": folder,
        "precision": {"dtype": "fp32"},
        "report": {"quiet": True},
        "checkpoint": {"every_steps": 0},
        **options,
    }
    loader = rows(world, "drop")
    return DistributedTrainer(model, optimizer, loader, build_config(TrainerConfig, values), loss=loss, world=world)


def train(world: World, make: Callable[[], nn.Module], options: dict[str, Any]) -> torch.Tensor:
    with tempfile.TemporaryDirectory() as folder, build(world, make(), folder, options) as trainer:
        trainer.train()
        whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in trainer.parallel.inner.parameters()]
        return torch.cat([one.detach().flatten() for one in whole])


def find_refusal(
    world: World,
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    loss: Callable[..., Any],
    optimizer: Callable[..., Any],
) -> tuple[int, str]:
    """The step at which the trainer refuses, -1 for its constructor, and what it says."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            trainer = build(world, make(), folder, options, loss, optimizer)
        except TrainerConfigError as exc:
            return -1, str(exc)
        with trainer, pytest.raises((TrainerConfigError, StallError)) as caught:
            trainer.train()
        return trainer.progress.step, str(caught.value)


def refusals(
    make: Callable[[], nn.Module],
    options: dict[str, Any],
    loss: Callable[..., Any] = square,
    optimizer: Callable[..., Any] = sgd,
) -> tuple[int, str]:
    """The same on both ranks, or on one of them in the words that the other one heard before it came to it."""
    answers = run_ranks(find_refusal, 2, make, options, loss, optimizer)
    (step, refusal), (step_of_other, heard) = sorted(answers, key=lambda answer: len(answer[1]))
    assert step == step_of_other
    assert heard == refusal or heard.endswith(f"TrainerConfigError: {refusal}")
    return step, refusal


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("zero", [1, 3])
def test_batch_norms_train_in_half_precision_when_sharded(zero: int, dtype: str) -> None:
    def run(zero: int) -> torch.Tensor:
        options = {"precision": {"dtype": dtype, "init_scale": 1024.0}, "parallel": {"zero": zero}}
        return run_ranks(train, 2, Normed, options)[0]

    assert torch.allclose(run(zero), run(0), atol=2e-2)


@pytest.mark.parametrize("zero", [1, 3])
@pytest.mark.parametrize("how", ["blocks", "first", "same"])
def test_weights_tied_across_sharded_blocks_train_as_unsharded(zero: int, how: str) -> None:
    found, expected = (run_ranks(train, 2, partial(Tied, how), {"parallel": {"zero": one}})[0] for one in (zero, 0))
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.slow
def test_a_parameter_without_dimensions_is_refused_where_it_cannot_be_sharded() -> None:
    step, message = refusals(Scaled, {"parallel": {"zero": 2}})
    assert step == -1
    assert "'scale' has no dimension" in message
    assert "shape (1,)" in message
    assert "parallel.zero=0" in message


def test_a_parameter_without_elements_is_refused_where_it_cannot_be_sharded(world: World, tmp_path: Path) -> None:
    model = nn.Module()
    model.register_parameter("none", nn.Parameter(torch.zeros(0, 3)))
    with pytest.raises(TrainerConfigError, match=r"parallel.zero=1: parameter 'none' of shape \(0, 3\) has no element"):
        make_trainer(world, str(tmp_path), model=model, parallel={"zero": 1})
    make_trainer(world, str(tmp_path), model=model).close()


def wrapped() -> nn.Module:
    return nn.parallel.DistributedDataParallel(nn.Linear(2, 2))


def wrapped_inside() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2), wrapped())


@pytest.mark.parametrize(
    ("make", "what"), [(wrapped, "model is"), (wrapped_inside, "module '1' of model=Sequential is")]
)
def test_a_model_that_exchanges_its_gradients_already_is_refused(make: Callable[[], nn.Module], what: str) -> None:
    step, message = refusals(make, {})
    assert step == -1
    assert message.startswith(f"{what} wrapped in DistributedDataParallel already")
    assert "give the bare module" in message


@pytest.mark.parametrize(
    ("optimizer", "zero", "cure"),
    [
        (torch.optim.Adafactor, 1, "parallel.zero=0"),
        (torch.optim.Rprop, 3, "parallel.zero=0"),
        (torch.optim.SparseAdam, 1, "parallel.zero=0"),
        (torch.optim.LBFGS, 0, "AdamW"),
    ],
)
def test_optimizers_that_cannot_work_are_refused_by_name(optimizer: Any, zero: int, cure: str) -> None:
    step, message = refusals(TwoWays, {"parallel": {"zero": zero, "unused_parameters": not zero}}, square, optimizer)
    assert step == -1
    assert f"optimizer={optimizer.__name__}" in message
    assert cure in message


class Picky(torch.optim.SGD):
    """Does with its parameters what torch cannot do with shards."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:  # torch's own skip these, too
                    parameter.grad[parameter.grad.gt(0)] = 1.0
        return super().step(closure)


def picky(parameters: Any) -> torch.optim.Optimizer:
    return Picky(parameters, lr=0.1)


def test_an_optimizer_that_fails_on_shards_is_named() -> None:
    step, message = refusals(TwoWays, {"parallel": {"zero": 1}}, square, picky)
    assert step == 0
    assert "optimizer=Picky" in message
    assert "parallel.zero=0" in message


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_sparse_gradients_are_clipped_as_one_rank_clips_dense_ones(dtype: str) -> None:
    options = {"step": {"clip_norm": 0.05}, "precision": {"dtype": dtype, "init_scale": 1024.0}}
    sparse = run_ranks(train, 2, Looked, options)
    expected = run_ranks(train, 1, partial(Looked, sparse=False), options)[0]
    assert torch.equal(*sparse)
    assert torch.allclose(sparse[0], expected, atol=1e-6 if dtype == "fp32" else 1e-3)


@pytest.mark.parametrize("options", [{"parallel": {"zero": 1}}, {"compression": {"scheme": "bf16"}}])
def test_sparse_gradients_are_refused_where_they_cannot_be_exchanged(options: dict[str, Any]) -> None:
    step, message = refusals(Looked, options)
    assert step == -1
    assert "'table'" in message
    assert "sparse=False" in message


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("loss", [score, score_inside])
def test_a_loss_that_goes_around_forward_is_refused_in_the_first_step(zero: int, loss: Callable[..., Any]) -> None:
    step, message = refusals(TwoWays, {"parallel": {"zero": zero, "unused_parameters": not zero}}, loss)
    assert step == 0
    assert "without calling the model" in message or "'score'" in message
    assert "forward" in message


def test_parameters_without_a_gradient_are_named_with_the_option_for_them() -> None:
    step, message = refusals(TwoWays, {"parallel": {"zero": 0}})
    assert step == 0
    assert "never.weight, never.bias" in message
    assert "parallel.unused_parameters=True" in message


class EveryOther(nn.Module):
    """Uses its second layer in every second forward, beginning with the first."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.other, self.calls = nn.Linear(2, 2), nn.Linear(2, 2), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.line(x) + (self.other(x) if self.calls % 2 else 0.0)


def test_parameters_without_a_gradient_in_the_last_microbatch_are_named() -> None:
    _, message = refusals(EveryOther, {"step": {"accumulate": 2}})
    assert "other.weight, other.bias" in message
    assert "parallel.unused_parameters=True" in message
