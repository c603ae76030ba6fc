"""Hooks on parameters of an unsharded model, and losses that differentiate through it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import Line, make_trainer, rows, square
from torch import nn

from penstock.trainer import TrainerConfigError, World


def count_calls(world: World, folder: str) -> list[tuple[int, int]]:
    model, seen, accumulated = Line(), [], []
    model.line.weight.register_hook(seen.append)
    model.line.weight.register_post_accumulate_grad_hook(accumulated.append)
    found = []
    with make_trainer(world, folder, rows(world, "drop"), model, checkpoint={"every_steps": 0}) as trainer:
        found.append((len(seen), len(accumulated)))
        trainer.train()
        found.append((len(seen), len(accumulated)))
    return found


def test_hooks_on_parameters_are_called_for_the_gradients_of_losses_alone(tmp_path: Path) -> None:
    assert run_ranks(count_calls, 2, str(tmp_path)) == [[(0, 0), (4, 4)]] * 2


def with_penalty(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    """The squared gradient by the inputs is part of the loss."""
    x = batch["x"].requires_grad_()
    total, count = square(model, batch)
    (gradient,) = torch.autograd.grad(total, x, create_graph=True)
    return total + gradient.square().sum(), count


def test_a_loss_with_a_gradient_in_it_is_refused_on_shards_and_told_why(world: World, tmp_path: Path) -> None:
    with (
        make_trainer(world, str(tmp_path), loss=with_penalty, parallel={"zero": 1}) as trainer,
        pytest.raises(TrainerConfigError, match=r"create_graph=True\) makes it: that needs parallel.zero=0"),
    ):
        trainer.train()
    with make_trainer(world, str(tmp_path), loss=with_penalty) as trainer:
        trainer.train()
