"""The planner against what ranks send and hold, on a small model, and the account of a step against counts by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from launch_ranks import run_ranks

from devtools.plan import Case, Rank, Row, compare
from devtools.step_account import allocations
from penstock.trainer import World

LAYOUTS = {
    2: ["dp=2,zero=1", "cp=2", "pp=2", "dp=2,ep=2,zero=2"],
    4: ["dp=2,tp=2,zero=3", "pp=2,tp=2,zero=1", "dp=2,ep=2,tp=2"],
}


def compare_all(world: World, folder: str, layouts: Sequence[str]) -> list[Row | None]:
    return [compare(Case(layout=one, size="small"), world, f"{folder}/{number}") for number, one in enumerate(layouts)]


@pytest.mark.full
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_send_what_the_planner_says_byte_by_byte(tmp_path: Path, ranks: int) -> None:
    rows: list[Row] = run_ranks(compare_all, ranks, str(tmp_path), LAYOUTS[ranks], timeout_s=290)[0]
    assert {row.layout: row.wire for row in rows if any(plan != sent for plan, sent in row.wire.values())} == {}
    assert [row.layout for row in rows] == LAYOUTS[ranks]
    for row in rows:
        for planned, measured in row.ranks:
            assert planned.parameters == measured.parameters, row.layout
            assert planned.optimizer == measured.optimizer, row.layout


def test_a_rows_faults_are_named() -> None:
    bytes_ = {"weights": 1.0, "gradients": 1.0, "optimizer": 1.0, "activations": 1.0}
    planned, measured = (Rank(parameters=1, **bytes_, peak=peak) for peak in (120.0, 100.0))
    row = Row(layout="tp=2", ranks=[(planned, measured)], wire={"tp": (8.0, 9.0)}, other=0.0, bubble=(0.0, 0.0))
    assert row.wrong == ["pp 0: peak 1.20 of what is measured", "tp: 8 and 9 bytes"]


def test_the_most_that_was_allocated_is_told() -> None:
    torch.zeros(8)
    with allocations() as most:
        one = torch.zeros(1000)
        two = one + 1
        del one, two
        torch.zeros(500)
    assert 8000 <= most[0] < 8100  # and a number as a tensor
