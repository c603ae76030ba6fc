"""Shares by speed look at all that a rank computes in a step, and at nothing that it waits for."""

from __future__ import annotations

import tempfile
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from launch_ranks import run_ranks
from small_trainers import make_trainer, rows
from torch import nn

from penstock.trainer import World, computing

SLOW, FAST = 80e-3, 10e-3
"""Seconds of backward for each row: much more than a rank waits for a core."""


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Net(nn.Module):
    """Its backward sleeps in the middle, after the gradients of the last layer are on their way."""

    def __init__(self, slow_rank: int) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.slow_rank = slow_rank
        self.register_buffer("count", torch.zeros(3))
        self.first, self.last = nn.Linear(2, 64), nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        is_slow = torch.distributed.get_rank() == self.slow_rank
        return self.last(SlowBackward.apply(self.first(x), len(x) * (SLOW if is_slow else FAST)))


def count_rows_after_ten_steps(world: World, scheme: str, slow_rank: int) -> int:
    loader = rows(world, size=23)
    options = {
        "shares": "auto",
        "shares_every": 2,
        "steps": 10,
        "compression": {"scheme": scheme},
        "parallel": {"bucket_mb": 1e-4},
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        make_trainer(world, folder, loader, Net(slow_rank), **options) as trainer,
    ):
        trainer.train()
        return len(next(iter(loader))["x"])


@pytest.mark.parametrize(("scheme", "slow_rank"), [("none", 2), ("none", 0), ("int8", 1)])
def test_a_rank_that_is_slow_in_backward_gets_fewer_samples(scheme: str, slow_rank: int) -> None:
    found = run_ranks(count_rows_after_ten_steps, 3, scheme, slow_rank)
    assert sum(found) == 23
    others = [rows for rank, rows in enumerate(found) if rank != slow_rank]
    assert found[slow_rank] <= 5 < min(others)


def test_the_clock_counts_up_to_the_last_gradient_and_leaves_waiting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0

    def pass_time(seconds: float) -> None:
        nonlocal now_s
        now_s += seconds

    monkeypatch.setattr(computing, "time", SimpleNamespace(perf_counter=lambda: now_s))
    model = nn.Linear(2, 1)
    clock = computing.ComputeClock(torch.device("cpu"))
    clock.listen(model)
    with clock.computing():
        loss = model(torch.ones(3, 2)).sum()
        pass_time(1)
    with clock.computing():
        with clock.waiting():
            pass_time(10)
        pass_time(100)
        loss.backward()
        with clock.waiting():
            pass_time(1000)
        pass_time(10_000)
    assert clock.take() == 101
    assert clock.take() == 0
