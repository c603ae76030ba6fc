from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import Ranks
from together_cases import make_trainer

from penstock.trainer.world import World

STALL_TIMEOUT_S = 4.0


class Hanging:
    """Batches that stop coming, or break, on one rank after two steps."""

    def __init__(self, rank: int, how: str) -> None:
        self._hangs = rank == 1
        self._how = how

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        for index in range(5):
            if self._hangs and index == 2:
                if self._how == "error":
                    raise ValueError("shard train-7.tar cannot be read")
                time.sleep(60.0)
            yield {"x": torch.ones(2, 2)}


def train_and_hang(world: World, folder: str, how: str) -> None:
    with make_trainer(world, folder, Hanging(world.rank, how), steps=5, stall_timeout_s=STALL_TIMEOUT_S) as trainer:
        trainer.train()


@pytest.mark.parametrize(
    ("how", "reason"),
    [("stall", "rank 1 is stalled in fetch (step=2, epoch=0)"), ("error", "shard train-7.tar cannot be read")],
)
def test_a_rank_whose_data_stop_stops_all_in_time_with_rank_phase_and_step(
    tmp_path: Path, how: str, reason: str
) -> None:
    started = time.monotonic()
    ranks: Any = Ranks(train_and_hang, 2, str(tmp_path), how)
    outcomes = ranks.join(timeout_s=40.0)
    assert time.monotonic() - started < 30.0
    assert all(outcome.exit_code not in (0, None) for outcome in outcomes)
    report = (tmp_path / "stalls" / "stall-rank-0.txt").read_text()
    assert reason in report
    assert "rank 1" in report
