"""Parameters that forward writes to are refused by name where what it writes would be lost, or differ between ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import TrainerConfigError, World


class Looked(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.Embedding) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.line = kind(24, 2, max_norm=0.5), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(self.table((x[:, :1] * 23).round().long()).reshape(-1, 2))


class Taught(nn.Module):
    """A teacher that forward moves, in place or by a new tensor, as in BYOL and MoCo."""

    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.blocks = nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)])
        self.student, self.teacher = nn.Linear(2, 2), nn.Linear(2, 2).requires_grad_(False)
        self.register_buffer("calls", torch.zeros(()))

    @torch.no_grad()
    def move(self) -> None:
        self.calls += 1
        for mine, its in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
            if self.how == "in place":
                its.mul_(0.5).add_(mine, alpha=0.5)
            elif self.how == "anew":
                its.data = its.data * 0.5 + mine.data * 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.move()
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.student(x) - 0.3 * self.teacher(x)


def refuse(world: World, model: Callable[[], nn.Module], zero: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        try:
            with make_trainer(world, folder, rows(world, "drop"), model(), parallel={"zero": zero}) as trainer:
                trainer.train()
        except TrainerConfigError as exc:
            return str(exc)
    return ""


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_shorten_their_rows_train_on_one_unsharded_rank(world: World, kind: type[nn.Module]) -> None:
    assert refuse(world, lambda: Looked(kind), 0) == ""
    assert "embedding 'table' has max_norm=0.5" in refuse(world, lambda: Looked(kind), 1)


def test_embeddings_that_shorten_their_rows_are_refused_on_several_ranks() -> None:
    for refusal in run_ranks(refuse, 2, Looked, 0):
        assert "embedding 'table' has max_norm=0.5" in refusal
        assert "several ranks" in refusal


def in_place() -> nn.Module:
    return Taught("in place")


def anew() -> nn.Module:
    return Taught("anew")


@pytest.mark.parametrize("how", ["in place", "anew"])
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_a_teacher_that_forward_moves_is_refused_in_shards(world: World, zero: int, how: str) -> None:
    refusal = refuse(world, lambda: Taught(how), zero)
    assert "forward writes to the parameters teacher.weight, teacher.bias, " in refusal
    assert refuse(world, lambda: Taught(how), 0) == ""


@pytest.mark.parametrize("model", [in_place, anew])
def test_it_is_refused_on_every_rank(model: Callable[[], nn.Module]) -> None:
    assert all("teacher.weight, teacher.bias" in refusal for refusal in run_ranks(refuse, 2, model, 3))


def train_in_vain(world: World) -> list[str]:
    return [refuse(world, lambda: Taught("not"), zero) for zero in (0, 1, 2, 3)]


def test_buffers_may_be_written_to(world: World, tmp_path: Path) -> None:
    assert train_in_vain(world) == [""] * 4
    assert run_ranks(train_in_vain, 2) == [[""] * 4] * 2
    for zero, dtype in ((2, "bf16"), (3, "bf16"), (3, "fp16")):
        options = {"parallel": {"zero": zero}, "precision": {"dtype": dtype}, "activation": {"every": 1}}
        with make_trainer(world, str(tmp_path / f"{zero}{dtype}"), model=Taught("not"), **options) as trainer:
            trainer.train()
