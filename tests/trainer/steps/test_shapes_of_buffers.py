"""Buffers that a forward makes as large as its batch needs: ranks with other batches would mix them up."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import TrainerError, World


class Cached(nn.Module):
    """Keeps places up to the longest row that it has seen, as rotary embeddings do."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.line, self.rank = nn.Linear(2, 2), rank
        self.register_buffer("places", torch.arange(2.0), persistent=False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if float(self.seen[0]) == 2:
            self.places = torch.arange(4.0 + self.rank)
        return self.line(x) + self.places[0]


def train(world: World, folder: str, options: dict[str, object]) -> tuple[int, str]:
    model = Cached(world.rank)
    with (
        make_trainer(world, folder, rows(world, "drop"), model, checkpoint={"every_steps": 0}, **options) as trainer,
        pytest.raises(TrainerError) as caught,
    ):
        trainer.train()
    return trainer.progress.step, str(caught.value)


@pytest.mark.parametrize("options", [{}, {"parallel": {"zero": 1}}, {"average_every": 3}])
def test_ranks_whose_buffers_come_apart_in_shape_are_told_by_name(tmp_path: Path, options: dict[str, object]) -> None:
    for step, told in run_ranks(train, 2, str(tmp_path), options):
        assert step == 1
        assert "buffer 'places' has shape (4,) on rank 0 and (5,) on rank 1" in told
