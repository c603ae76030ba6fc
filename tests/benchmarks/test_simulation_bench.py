"""The simulation beside real ranks on a real server, loosely: the machine of a test may be busy."""

from __future__ import annotations

import shutil

import pytest

from penstock.benchmarks import simulation


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("radosgw") is None, reason="needs Ceph's radosgw: tests/servers/s3_server.sh install")
def test_a_simulated_job_that_waits_for_its_store_is_near_the_real_one() -> None:
    case = simulation.Case(name="latency", delay_s=0.5, step_s=0.02)
    with simulation.set_scene() as scene:
        row = simulation.compare(scene, case, 1)
    assert row["real"]["data_wait"] > 0.4
    assert simulation.is_near(row, tolerance=0.4), row
