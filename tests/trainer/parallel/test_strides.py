"""Parameters and buffers that do not lie contiguous in memory, or are of rare formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import TrainerConfigError, World


class Laid(nn.Module):
    """Differs from rank to rank when it is built, and changes its buffers as it goes."""

    def __init__(self, rank: int, strided: bool, odd: bool) -> None:
        super().__init__()
        torch.manual_seed(rank)
        whole = torch.randn(4, 4)
        self.line = nn.Linear(2, 2)
        self.weight = nn.Parameter(whole[:2, ::2] if strided else whole[:2, :2].clone())
        self.register_buffer("column", torch.randn(3, 4)[:, 1])
        same = torch.randn(2).expand(3, 2)
        self.register_buffer("same", same if odd else same.clone())
        self.register_buffer("small", torch.full((3,), rank, dtype=torch.int16 if odd else torch.int32))
        self.register_buffer("turned", torch.randn(2, 3).t())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.column += x.mean()
        return self.line(x @ self.weight) + self.same[0] + self.column.sum() + self.turned.sum()


def train(world: World, folder: str, options: dict[str, Any]) -> list[list[float]]:
    # Shards are contiguous; DDP takes nothing that was expanded, and with gloo not all formats.
    model = Laid(world.rank, strided="parallel" not in options, odd=bool(options))
    values = {"checkpoint": {"every_steps": 2}, "step": {"on_nan": "skip"}, **options}
    with make_trainer(world, folder, rows(world, "drop"), model, **values) as trainer:
        trainer.train()
    whole = [getattr(one, "full_tensor", lambda one=one: one)() for one in model.parameters()]
    return [one.flatten().tolist() for one in (*whole, *model.buffers())]


@pytest.mark.parametrize("options", [{}, {"average_every": 2}, {"parallel": {"zero": 1}}, {"parallel": {"zero": 3}}])
def test_all_ranks_have_those_of_rank_0_whatever_their_strides_and_formats(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    first, second = run_ranks(train, 2, str(tmp_path), options)
    assert first == second


@pytest.mark.parametrize("zero", [1, 3])
def test_a_parameter_that_is_not_contiguous_is_refused_by_name_where_it_would_be_sharded(
    world: World, tmp_path: Path, zero: int
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2))
    model.register_parameter("turned", nn.Parameter(torch.randn(2, 3).t()))
    with pytest.raises(
        TrainerConfigError, match=rf"parallel.zero={zero}: parameter 'turned' of shape \(3, 2\) has str"
    ):
        make_trainer(world, str(tmp_path), model=model, parallel={"zero": zero})
    make_trainer(world, str(tmp_path), model=model).close()


class Stored(nn.Module):
    """A line beside what gloo does not send from rank to rank as DDP would have it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.line = nn.Linear(2, 2)
        if kind == "wide":
            self.wide = nn.Parameter(torch.ones(1, 2).expand(6, 2))
        else:
            self.register_buffer("place", torch.zeros(2, dtype=torch.int16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(x)


def refusal(world: World, folder: str, kind: str) -> str:
    with pytest.raises(TrainerConfigError) as caught:
        make_trainer(world, folder, model=Stored(kind))
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("wide", ["parallel.zero=0 on several ranks: wide were expanded", ".clone()"]),
        ("short", ["parallel.zero=0 on several ranks: place (torch.int16)", "int32", "parallel.zero=1"]),
    ],
)
def test_what_cannot_be_copied_from_rank_to_rank_is_refused_by_name(tmp_path: Path, kind: str, told: list[str]) -> None:
    for message in run_ranks(refusal, 2, str(tmp_path), kind):
        assert all(words in message for words in told), message


class Turned(nn.Module):
    """A block with a complex weight, and a head of real ones."""

    def __init__(self) -> None:
        super().__init__()
        block = nn.Module()
        block.turn = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        block.forward = lambda x: (x.float() * block.turn).abs()  # type: ignore[method-assign]
        self.blocks = nn.ModuleList([block])
        self.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks[0](x).to(self.head.weight.dtype))


@pytest.mark.parametrize(("dtype", "reduce_dtype"), [("fp32", "bf16"), ("bf16", "fp32"), ("bf16", "bf16")])
def test_complex_shards_are_refused_by_name_where_their_gradients_would_be_made_real(
    world: World, tmp_path: Path, dtype: str, reduce_dtype: str
) -> None:
    precision = {"dtype": dtype, "reduce_dtype": reduce_dtype}
    if dtype == reduce_dtype:
        with make_trainer(world, str(tmp_path), model=Turned(), precision=precision, parallel={"zero": 3}) as trainer:
            trainer.train()
        return
    with pytest.raises(TrainerConfigError, match=rf"blocks\.0\.turn cannot be; set precision\.reduce_dtype='{dtype}'"):
        make_trainer(world, str(tmp_path), model=Turned(), precision=precision, parallel={"zero": 3})
