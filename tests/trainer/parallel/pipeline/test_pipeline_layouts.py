"""The trainer on pipelines of real ranks: the weights, buffers and losses of one process."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from launch_ranks import Ranks, run_ranks
from layout_runs import compare_layouts, die_in_a_step, resume_across, start_with_weights


def test_two_stages_train_what_one_process_trains() -> None:
    cases = [
        {"model": "llama", "layout": {"pp": 2, "microbatches": 4}, "accumulate": 3, "clip": 0.5},
        {"model": "gpt", "layout": {"pp": 2, "microbatches": 4, "zero": 1}, "clip": 0.5},
        {"model": "convolutions", "layout": {"pp": 2, "microbatches": 4, "schedule": "ZBVZeroBubble"}},
    ]
    assert [one for found in run_ranks(compare_layouts, 2, cases, timeout_s=300.0) for one in found] == []


@pytest.mark.full
def test_stages_of_two_replicas_train_what_one_process_trains() -> None:
    cases = [
        {
            "model": "gpt",
            "layout": {"pp": 2, "microbatches": 4, "zero": zero},
            "accumulate": 1 + 2 * (zero % 2),
            "clip": 0.5,
        }
        for zero in (0, 1, 2, 3)
    ]
    cases.append(
        {"model": "llama", "layout": {"pp": 2, "microbatches": 4, "zero": 3, "schedule": "InterleavedZeroBubble"}}
    )
    cases.append({"model": "llama", "layout": {"pp": 2, "microbatches": 4, "zero": 0, "schedule": "DualPipeV"}})
    assert [one for found in run_ranks(compare_layouts, 4, cases, timeout_s=300.0) for one in found] == []


@pytest.mark.full
def test_stages_that_tensor_parallelism_cuts_train_what_one_process_trains() -> None:
    layout = {"pp": 2, "tp": 2, "microbatches": 4}
    cases = [
        {"model": "llama", "layout": {**layout, "zero": 0}, "accumulate": 3, "clip": 0.5},
        {"model": "tied llama", "layout": {**layout, "zero": 1}, "clip": 0.5},
        {"model": "llama", "layout": {**layout, "zero": 2}, "accumulate": 3},
        {"model": "llama", "layout": {**layout, "zero": 3, "schedule": "ZBVZeroBubble"}, "clip": 0.5},
        {"model": "tied llama", "layout": {**layout, "schedule": "Interleaved1F1B"}, "clip": 0.5},
    ]
    assert [one for found in run_ranks(compare_layouts, 4, cases, timeout_s=300.0) for one in found] == []


@pytest.mark.full
def test_a_rank_of_a_cut_stage_that_dies_is_named_and_another_layout_resumes(tmp_path: Path) -> None:
    layout = {"pp": 2, "tp": 2, "microbatches": 4}
    ranks: Any = Ranks(die_in_a_step, 4, str(tmp_path), layout, "llama")
    outcomes = ranks.join(timeout_s=240.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert all(outcomes[rank].exit_code not in (0, None) for rank in (0, 2, 3))
    assert "rank 1 (pp 0, tp 1)" in (tmp_path / "stalls" / "stall-rank-0.txt").read_text()
    layouts = [{"pp": 2, "microbatches": 4}]
    found = run_ranks(resume_across, 2, "llama", layouts, str(tmp_path), timeout_s=300.0)
    assert [one for its in found for one in its] == []


@pytest.mark.full
@pytest.mark.parametrize("dying", [1, 4, 7])
def test_a_killed_rank_of_eight_costs_nothing_whatever_the_layout_that_resumes(tmp_path: Path, dying: int) -> None:
    layout = {"pp": 2, "tp": 2, "microbatches": 4}
    ranks: Any = Ranks(die_in_a_step, 8, str(tmp_path / "run"), layout, "llama", dying)
    outcomes = ranks.join(timeout_s=240.0)
    assert outcomes[dying].exit_code == -signal.SIGKILL
    assert all(outcomes[rank].exit_code not in (0, None) for rank in range(8) if rank != dying)
    others: list[tuple[int, dict[str, int]]] = [(4, {"pp": 2, "microbatches": 4}), (2, {"tp": 2}), (4, {})]
    for number, (count, other) in enumerate(others):
        folder = shutil.copytree(tmp_path / "run", tmp_path / str(number))
        found = run_ranks(resume_across, count, "llama", [other], str(folder), timeout_s=300.0)
        assert [one for its in found for one in its] == [], other


def test_a_run_resumes_with_other_stages_and_without(tmp_path: Path) -> None:
    layouts = [{"pp": 2, "microbatches": 8}, {"zero": 2}, {"pp": 2, "microbatches": 8, "zero": 1}]
    found = run_ranks(resume_across, 2, "gpt", layouts, str(tmp_path), timeout_s=300.0)
    assert [one for its in found for one in its] == []


def test_stages_start_with_the_weights_of_a_file(tmp_path: Path) -> None:
    """Weights that stages share come by any of their names; what does not fit is refused on every rank."""
    for found in run_ranks(start_with_weights, 2, str(tmp_path), {"pp": 2, "microbatches": 4}, timeout_s=300.0):
        refused = [one for one in found if "init_from=" in one]
        assert found == refused
        assert [one.split(":")[0] for one in refused] == ["names that differ", "names that lack", "too many names"]
        assert "lm_head.weight and model.embed_tokens.weight are one tensor in the model and differ" in refused[0]
        assert "1 of the model's are missing there: lm_head.weight" in refused[1]
        assert "1 of the source's are not in the model: more" in refused[2]


def test_batch_norms_of_stages_resume(tmp_path: Path) -> None:
    layouts = [{"pp": 2, "microbatches": 8}, {"pp": 2, "microbatches": 8, "schedule": "GPipe"}]
    found = run_ranks(resume_across, 2, "convolutions", layouts, str(tmp_path), timeout_s=300.0)
    assert [one for its in found for one in its] == []


@pytest.mark.slow
def test_a_stage_that_dies_is_named_and_nobody_waits_for_it(tmp_path: Path) -> None:
    ranks: Any = Ranks(die_in_a_step, 2, str(tmp_path))
    outcomes = ranks.join(timeout_s=240.0)
    assert outcomes[1].exit_code == -signal.SIGKILL
    assert outcomes[0].exit_code not in (0, None)
    report = (tmp_path / "stalls" / "stall-rank-0.txt").read_text()
    assert "rank 1" in report
