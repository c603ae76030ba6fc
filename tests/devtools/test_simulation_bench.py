"""The simulation beside real ranks on a real server, loosely: the machine of a test may be busy."""

from __future__ import annotations

from typing import Any

import pytest

from devtools import simulation


@pytest.mark.full
@pytest.mark.s3
def test_a_simulated_job_that_waits_for_its_store_is_near_the_real_one(
    s3_endpoint: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_S3_ENDPOINT", s3_endpoint["endpoint"])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_endpoint["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_endpoint["secret_key"])
    case = simulation.Case(name="latency", delay_s=0.5, step_s=0.02)
    with simulation.set_scene() as scene:
        row = simulation.compare(scene, case, 1)
    assert row["real"]["data_wait"] > 0.4
    assert simulation.is_near(row, tolerance=0.4), row
