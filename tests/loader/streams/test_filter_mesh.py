"""Processes of one tensor-parallel group get the same survivors, though each tells what it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.loader import pack

SAMPLES = 300


@pytest.mark.slow
def test_groups_of_a_mesh_share_out_survivors_and_each_process_of_a_group_gets_the_same(tmp_path: Path) -> None:
    pack(({"n": i} for i in range(SAMPLES)), tmp_path / "data", format="parquet", shard_bytes=400, progress=False)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    script = Path(__file__).with_name("mesh_script.py")
    subprocess.run(
        [*command, str(script), str(tmp_path / "data"), str(tmp_path)],
        check=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    told = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    assert told[0] == told[1]
    assert told[2] == told[3]
    assert told[0]["state"] == told[2]["state"]
    for one, other in zip(told[0]["epochs"], told[2]["epochs"], strict=True):
        assert len(one) == len(other)
        assert sorted(i for batch in one + other for i in batch) == [i for i in range(SAMPLES) if i % 3]
