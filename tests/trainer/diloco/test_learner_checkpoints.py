"""Learners resume exactly as they were, and by a rule where there are others."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from launch_ranks import Ranks, run_ranks
from learner_cases import Weights, train, train_and_listen, train_until_killed

from penstock.trainer import World, export_safetensors

pytestmark = pytest.mark.slow

STREAMED: dict[str, Any] = {"learners": 2, "every": 4, "fragments": 2, "overlap": 1, "alpha": 0.25}
SAVED: dict[str, Any] = {"checkpoint": {"every_steps": 3, "keep_last": 9, "folder": "saved"}, "ema": {"decay": 0.9}}
TOLERANCE = 2e-6


def far(one: Weights, other: Weights) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in other)


def is_equal(one: Weights, other: Weights) -> bool:
    return all(torch.equal(one[name], other[name]) for name in other)


CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "streamed": (STREAMED, SAVED),
    "int8": ({**STREAMED, "codec": "int8"}, SAVED),
    "bf16": ({**STREAMED, "codec": "bf16"}, {**SAVED, "precision": {"dtype": "bf16"}}),
}


def train_whole(world: World, folder: str) -> dict[str, Weights]:
    return {name: train(world, f"{folder}/{name}-whole", case[0], **case[1]) for name, case in CASES.items()}


def stop_and_go_on(world: World, folder: str) -> dict[str, Weights]:
    """Runs that end between two exchanges, or while one is under way (6), all of which another trainer continues."""
    found = {}
    for name, steps in (("streamed", 3), ("streamed", 6), ("int8", 6), ("bf16", 5)):
        diloco, options = CASES[name]
        place = f"{folder}/{name}-{steps}"
        train(world, place, diloco, **options, steps=steps)
        found[f"{name} {steps}"] = train(world, place, diloco, **options)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Weights]]:
    folder = tmp_path_factory.mktemp("whole")
    return folder, run_ranks(train_whole, 2, str(folder), timeout_s=120)[0]


def test_a_run_that_was_stopped_ends_bit_equal_to_an_unbroken_one(whole: Any, tmp_path: Path) -> None:
    for found in run_ranks(stop_and_go_on, 2, str(tmp_path), timeout_s=240):
        for name, weights in found.items():
            assert is_equal(weights, whole[1][name.split()[0]]), name


def test_a_killed_learner_and_a_restart_end_bit_equal_to_an_unbroken_run(whole: Any, tmp_path: Path) -> None:
    diloco, options = CASES["int8"]
    outcomes = Ranks(train_until_killed, 2, str(tmp_path), diloco, 9, options).join(60)
    assert outcomes[1].exit_code == -9
    assert any((tmp_path / "saved").glob("step-*"))
    for weights in run_ranks(go_on, 2, str(tmp_path), diloco, options, timeout_s=60):
        assert is_equal(weights, whole[1]["int8"])


def go_on(world: World, folder: str, diloco: dict[str, Any] | None, options: dict[str, Any]) -> Weights:
    return train(world, folder, diloco, **options)


EVEN: dict[str, Any] = {**SAVED, "rows": 48}
"""Batches that any number of ranks cuts alike between two learners."""


def save_even(world: World, folder: str) -> dict[str, Weights]:
    whole = train(world, f"{folder}/even-whole", STREAMED, **EVEN)
    for codec in ("fp32", "int8"):
        train(world, f"{folder}/{codec}", {**STREAMED, "codec": codec}, **EVEN, steps=6)
    int8 = train(world, f"{folder}/int8-whole", {**STREAMED, "codec": "int8"}, **EVEN)
    mean = train(world, f"{folder}/mean", {**STREAMED, "fragments": 1, "overlap": 0}, **EVEN, steps=6)
    allreduce = train(world, f"{folder}/allreduce", None, **EVEN, steps=6)
    return {"fp32": whole, "int8": int8, "mean": mean, "allreduce": allreduce}


def resume_on_four(world: World, folder: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for zero in (0, 3):
        for codec in ("fp32", "int8"):
            place = f"{folder}/{codec}-{zero}"
            if world.is_first:
                shutil.copytree(f"{folder}/{codec}/saved", f"{place}/saved")
            torch.distributed.barrier()
            found[f"{codec} {zero}"] = train(world, place, {**STREAMED, "codec": codec}, zero=zero, **EVEN)
    four = {**STREAMED, "learners": 4, "fragments": 1, "overlap": 0}
    for name, place, diloco in (
        ("four learners", "mean", four),
        ("other fragments", "fp32", {**STREAMED, "fragments": 1}),
        ("plain", "mean", None),
        ("from plain", "allreduce", four),
    ):
        found[name] = train_and_listen(world, f"{folder}/{place}", diloco, **EVEN, steps=6)
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Weights], list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("resumed")
    before = run_ranks(save_even, 2, str(folder), timeout_s=120)[0]
    return folder, before, run_ranks(resume_on_four, 4, str(folder), timeout_s=180)


def test_learners_of_more_ranks_continue_as_those_that_were_saved(resumed: Any) -> None:
    _, before, everywhere = resumed
    for found in everywhere:
        for zero in (0, 3):
            assert far(found[f"fp32 {zero}"], before["fp32"]) < TOLERANCE
            assert far(found[f"int8 {zero}"], before["int8"]) < 1e-2  # parts have other scales


def test_other_learners_continue_from_the_mean_and_say_so(resumed: Any) -> None:
    _, before, everywhere = resumed
    for name, of, note in (
        ("four learners", "mean", "the checkpoint is of 2 learners, and there are 4"),
        ("plain", "mean", "the checkpoint is of 2 learners, and parallel.mode='allreduce' has none"),
        ("from plain", "allreduce", "the checkpoint has no outer optimizer"),
    ):
        weights, records = everywhere[0][name]
        assert is_equal(weights, before[of]), name
        assert any(note in one.get("note", "") for one in records), records


def test_what_an_export_takes_of_a_checkpoint_is_the_mean(resumed: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder, before, _ = resumed
    export_safetensors(folder / "mean" / "saved" / "step-6", tmp_path / "weights.safetensors")
    assert is_equal(load_file(tmp_path / "weights.safetensors"), before["mean"])
