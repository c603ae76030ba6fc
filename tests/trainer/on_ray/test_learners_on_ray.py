"""Learners of DiLoCo on a real Ray cluster: one that dies is replaced, as is a shard, and each batch counts once."""

from __future__ import annotations

from pathlib import Path

import pytest
from ray_cluster import run_ray
from ray_runs import counts, kill, start, wait_for_batches

pytestmark = [pytest.mark.slow, pytest.mark.full, pytest.mark.timeout(900)]

LEARNERS = (
    "--trainer.parallel.mode=diloco",
    "--trainer.parallel.diloco.over=server",
    "--trainer.parallel.diloco.every=10",
    "--trainer.parallel.diloco.rate=1.0",
    "--trainer.parallel.diloco.momentum=0.0",
)


def test_a_learner_and_a_shard_are_killed_and_every_batch_counts_once(tmp_path: Path) -> None:
    options = ("--workers=2", "--shards=2", "--trainer.server.replicas=2", "--trainer.server.policy=asp")
    with run_ray(4) as address, start(tmp_path, *LEARNERS, *options, address=address) as process:
        for name, batches in (("worker-001", 60), ("shard-1", 200)):
            kill(wait_for_batches(tmp_path, process, batches), name)
        assert process.wait(600) == 0, (tmp_path / "log").read_text()
    assert counts(tmp_path) == [1.0] * 240  # two epochs, of which two learners' mean has half
    log = (tmp_path / "log").read_text()
    assert "worker-001 died" in log
    assert "shard-1 started anew, from copies" in log
