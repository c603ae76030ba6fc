"""Processes of one tensor-parallel group get the same survivors, though each tells what it finds."""

from __future__ import annotations

from pathlib import Path

import mesh_script
import pytest
from launch_ranks import run_ranks

from penstock.loader import pack

SAMPLES = 300


@pytest.mark.slow
def test_groups_of_a_mesh_share_out_survivors_and_each_process_of_a_group_gets_the_same(tmp_path: Path) -> None:
    pack(({"n": i} for i in range(SAMPLES)), tmp_path / "data", format="parquet", shard_bytes=400, progress=False)
    told = run_ranks(mesh_script.main, 4, str(tmp_path / "data"), timeout_s=120.0)
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert told[0]["state"] == told[2]["state"]
    for one, other in zip(told[0]["epochs"], told[2]["epochs"], strict=True):
        assert len(one) == len(other)
        assert sorted(i for batch in one + other for i in batch) == [i for i in range(SAMPLES) if i % 3]
