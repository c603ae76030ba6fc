"""fp16's loss scale over restarts: it goes on, and how it changes is what is given now."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from small_trainers import make_trainer

from penstock.trainer import World


def train(world: World, folder: Path, steps: int, **scaling: Any) -> tuple[list[float], list[str]]:
    """The scale after each step of the run so far, and the notes about it."""
    precision = {"dtype": "fp16", "init_scale": 256.0, "growth_interval": 3, **scaling}
    with make_trainer(world, str(folder), steps=steps, precision=precision, checkpoint={"every_steps": 4}) as trainer:
        trainer.train()
    records = list(map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()))
    scales = [one["loss_scale"] for one in records if one["kind"] == "train"]
    return scales, [one["note"] for one in records if one["kind"] == "note" and "precision" in one["note"]]


@pytest.mark.slow
def test_the_scale_goes_on_as_in_an_unbroken_run(world: World, tmp_path: Path) -> None:
    train(world, tmp_path / "run", 4)
    found = train(world, tmp_path / "run", 9)
    assert found == train(world, tmp_path / "whole", 9)
    assert found == ([256, 256, 512, 512, 512, 1024, 1024, 1024, 2048], [])


@pytest.mark.parametrize(
    ("before", "now", "scales", "notes"),
    [
        ({"growth_interval": 2000}, {"growth_interval": 2}, [512, 512, 1024, 1024], ["growth_interval=2", "had 2000"]),
        ({"growth_interval": 4}, {"growth_factor": 4.0}, [512, 512, 2048, 2048], ["growth_factor=4.0", "had 2.0"]),
        ({}, {"backoff_factor": 0.25}, [512, 1024, 1024, 1024], ["backoff_factor=0.25", "had 0.5"]),
    ],
)
def test_settings_of_the_scale_are_those_given_now_and_a_note_says_so(
    world: World, tmp_path: Path, before: Any, now: Any, scales: list[float], notes: list[str]
) -> None:
    train(world, tmp_path, 4, **before)
    found, told = train(world, tmp_path, 8, **now)
    assert found[4:] == scales
    assert any(all(words in note for words in notes) for note in told)
