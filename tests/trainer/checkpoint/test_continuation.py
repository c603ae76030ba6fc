from __future__ import annotations

import json
from pathlib import Path

import torch
from chain_cases import CHAIN, train_link
from launch import run_ranks

from penstock.trainer import World


def test_a_killed_rank_and_a_restart_end_bit_equal_to_an_unbroken_run(tmp_path: Path) -> None:
    done = run_ranks(Path(__file__).parents[1] / "killed.py", 2, str(tmp_path), "11", options=("--max-restarts=1",))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    for rank in range(2):
        killed = torch.load(tmp_path / f"killed-{rank}.pt", weights_only=True)
        whole = torch.load(tmp_path / f"whole-{rank}.pt", weights_only=True)
        assert killed["began"] in (4, 8)  # the save of step 8 may have been under way
        assert whole["began"] == 0
        for one, other in zip(killed["weights"], whole["weights"], strict=True):
            assert torch.equal(one, other)


def test_other_worlds_and_zero_stages_continue_with_the_same_global_batches(
    ranks_folder: Path, world: World, tmp_path: Path
) -> None:
    with train_link(str(tmp_path), world, 0, steps=5 * len(CHAIN)) as alone:
        expected_ids = [sorted(ids) for ids in alone.train_and_list_ids()]
        expected = alone.parallel.inner.state_dict()
    found_ids = []
    for turn, (size, _) in enumerate(CHAIN):
        ranks = [json.loads((ranks_folder / f"chain-{turn}-{rank}.json").read_text()) for rank in range(size)]
        assert {rank["began"] for rank in ranks} == {5 * turn}
        found_ids += [
            sorted(i for part in parts for i in part) for parts in zip(*(r["ids"] for r in ranks), strict=True)
        ]
    assert found_ids == expected_ids
    found = torch.load(ranks_folder / "chain.pt", weights_only=True)
    assert max(float((found[name] - expected[name]).abs().max()) for name in expected) <= 1e-6
