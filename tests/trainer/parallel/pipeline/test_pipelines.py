"""Pipelines on real ranks: the gradients of one process, by every schedule."""

from __future__ import annotations

from launch_ranks import run_ranks
from pipeline_cases import CASES
from pipeline_runs import compare

from penstock.trainer.parallel.pipeline.orders import SCHEDULES


def test_two_ranks_have_the_gradients_of_one_process() -> None:
    cases = [(name, schedule, 16, 8) for name in CASES for schedule in ("1F1B", "ZBVZeroBubble")]
    cases += [("perceptron", schedule, 16, 8) for schedule in SCHEDULES]
    cases += [("llama", "1F1B", 12, 8)]  # of which it is 6 parts
    assert run_ranks(compare, 2, cases, timeout_s=300.0)[0] == []
