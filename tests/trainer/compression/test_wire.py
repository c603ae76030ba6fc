"""The bytes that a run reports are those that the backend sends, over all of its restarts."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import run_ranks
from small_trainers import Line, make_trainer, rows

from penstock.trainer import World

NUMEL = sum(parameter.numel() for parameter in Line().parameters())


def train(world: World, folder: str, steps: int, options: dict[str, Any]) -> tuple[int, int]:
    with make_trainer(
        world, folder, rows(world), steps=steps, checkpoint={"every_steps": 4, "background": False}, **options
    ) as trainer:
        summary = trainer.train()
        return summary.wire_bytes, summary.plain_bytes


def train_whole_and_in_parts(world: World, folder: str, options: dict[str, Any]) -> list[tuple[int, int]]:
    whole = train(world, f"{folder}/whole", 8, options)
    first = train(world, f"{folder}/parts", 4, options)
    return [whole, first, train(world, f"{folder}/parts", 8, options)]


@pytest.mark.parametrize(
    ("options", "each_step"),
    [
        ({}, 4 * NUMEL),
        ({"compression": {"scheme": "bf16"}}, 2 * NUMEL),
        ({"parallel": {"zero": 2}}, 4 * NUMEL),  # gloo reduces and scatters by an all-reduce
        ({"parallel": {"zero": 2}, "compression": {"scheme": "bf16"}}, 2 * NUMEL),
        ({"average_every": 2}, 2 * NUMEL),
    ],
    ids=["none", "bf16", "sharded", "sharded bf16", "local SGD"],
)
def test_bytes_are_counted_as_gloo_sends_them_and_over_a_resume(options: dict[str, Any], each_step: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for whole, first, resumed in run_ranks(train_whole_and_in_parts, 2, folder, options):
            assert whole[0] == 8 * each_step
            assert first[0] == 4 * each_step
            assert resumed == whole


def test_a_state_without_counts_is_read(world: World, tmp_path: Path) -> None:
    with make_trainer(world, str(tmp_path)) as trainer:
        state = json.loads(json.dumps(trainer.state_dict()))
        state.pop("sent", None)
        trainer.load_state_dict(state)
        assert trainer.train().wire_bytes == 0
