"""Models that ranks build differently: named by the first difference, before anything is mixed up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer
from torch import nn

from penstock.trainer import TrainerConfigError, World

DIFFERENCES = {
    "same": "",
    "order": "rank 0 has parameter 'a.weight' of torch.float32, shape (2, 2) where rank 1 has parameter 'b.weight'",
    "more": "rank 0 has nothing more where rank 1 has parameter 'more.weight'",
    "fewer": "rank 0 has parameter 'more.weight' of torch.float32, shape (2, 2) where rank 1 has nothing more",
    "shape": "rank 0 has parameter 'more' of torch.float32, shape (2, 3) where rank 1 has parameter 'more' of "
    "torch.float32, shape (3, 2)",
    "format": "rank 0 has parameter 'b.weight' of torch.float32, shape (2, 2) where rank 1 has parameter 'b.weight' of "
    "torch.float64",
    "frozen": "where rank 1 has parameter 'b.weight' of torch.float32, shape (2, 2), frozen",
    "tied": "where rank 1 has parameter 'b.weight' of torch.float32, shape (2, 2), tied to 'a.weight'",
    "buffer": "rank 0 has nothing more where rank 1 has buffer 'kept' of torch.float32, shape (3,)",
}


class Two(nn.Module):
    def __init__(self, how: str, is_other: bool) -> None:
        super().__init__()
        for name in "ba" if how == "order" and is_other else "ab":
            setattr(self, name, nn.Linear(2, 2))
        if (how, is_other) in (("more", True), ("fewer", False)):
            self.more = nn.Linear(2, 2)
        if how == "shape":
            self.more = nn.Parameter(torch.ones((3, 2) if is_other else (2, 3)))
        if is_other and how == "format":
            self.b.double()
        if is_other and how == "frozen":
            self.b.requires_grad_(False)
        if is_other and how == "tied":
            self.b.weight = self.a.weight
        if is_other and how == "buffer":
            self.register_buffer("kept", torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x))  # type: ignore[no-any-return]


def train_each(world: World, folder: str) -> dict[tuple[str, int], str]:
    found = {}
    for how in DIFFERENCES:
        for zero in (0, 2):
            try:
                model = Two(how, world.rank == 1)
                with make_trainer(world, f"{folder}/{how}-{zero}", model=model, parallel={"zero": zero}) as trainer:
                    trainer.train()
                found[how, zero] = ""
            except TrainerConfigError as exc:
                found[how, zero] = str(exc)
    return found


def test_models_that_differ_between_ranks_are_refused_by_the_first_difference(tmp_path: Path) -> None:
    for found in run_ranks(train_each, 3, str(tmp_path)):
        for (how, zero), told in found.items():
            assert DIFFERENCES[how] in told, (how, zero)
            assert bool(DIFFERENCES[how]) == bool(told), (how, zero)


def test_a_rank_alone_compares_nothing(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path), model=Two("tied", True)) as trainer:
        assert trainer.train().steps == 4


@pytest.mark.parametrize("zero", [0, 3])
def test_a_model_on_the_meta_device_is_compared_too(tmp_path: Path, zero: int) -> None:
    for told in run_ranks(build_on_meta_apart, 2, str(tmp_path), zero):
        assert "rank 0 has nothing more where rank 1 has parameter 'more.weight'" in told


def build_on_meta_apart(world: World, folder: str, zero: int) -> str:
    with torch.device("meta"):
        model = Two("more", world.rank == 1)
    try:
        make_trainer(world, folder, model=model, parallel={"zero": zero})
    except TrainerConfigError as exc:
        return str(exc)
    return ""
