from __future__ import annotations

from pathlib import Path

import pytest
import torch
from parity_cases import Case, all_cases, train_case, train_naively

from penstock.trainer import World

CASES = [(size, case) for size in (2, 3, 4) for case in all_cases(size)]


def bound(case: Case) -> float:
    """fp32: rounding of sums only. bf16 keeps 8 bits and fp16 11 of each product; 20 steps at rate 0.1 add up."""
    return {"bf16": 1e-2, "fp16": 1e-3}.get(case.name.split("-")[0], 1e-6)


@pytest.mark.parametrize(("size", "case"), CASES, ids=[f"{size}-{case.name}" for size, case in CASES])
def test_ranks_train_the_parameters_that_one_process_trains(ranks_folder: Path, size: int, case: Case) -> None:
    found = torch.load(ranks_folder / f"{size}-{case.name}.pt", weights_only=True)
    expected = train_naively(case)
    assert found.keys() == expected.keys()
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= bound(case)


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize("case", all_cases(1), ids=lambda case: case.name)
def test_the_trainer_alone_trains_the_parameters_that_the_naive_loop_trains(world: World, case: Case) -> None:
    found, expected = train_case(case, world), train_naively(case)
    worst = max(float((found[name] - expected[name]).abs().max()) for name in expected)
    assert worst <= bound(case)
