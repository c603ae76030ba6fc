"""Pipelines on real ranks: the gradients of one process, by every schedule."""

from __future__ import annotations

from launch_ranks import run_ranks
from pipeline_cases import CASES
from pipeline_runs import agree_on_tied_groups, compare

from penstock.trainer.parallel.pipeline.orders import SCHEDULES


def test_two_ranks_have_the_gradients_of_one_process() -> None:
    cases = [(name, schedule, 16, 8) for name in CASES for schedule in ("1F1B", "ZBVZeroBubble")]
    cases += [("perceptron", schedule, 16, 8) for schedule in SCHEDULES]
    cases += [("llama", "1F1B", 12, 8)]  # of which it is 6 parts
    assert run_ranks(compare, 2, cases, timeout_s=300.0)[0] == []


def test_a_weight_of_two_stages_is_in_one_group_of_the_optimizer() -> None:
    named = "several stages have model.embed_tokens.weight, and the optimizer has it in group 0 on one and in group 1"
    assert all(named in told for told in run_ranks(agree_on_tied_groups, 2, True))
    assert run_ranks(agree_on_tied_groups, 2, False) == ["", ""]
