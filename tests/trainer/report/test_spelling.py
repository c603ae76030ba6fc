"""Names of metrics that look alike where fewer characters are allowed."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.trainer.report.prometheus import Prometheus
from penstock.trainer.report.trackers import MLflow


def test_metrics_that_prometheus_would_call_alike_are_all_served() -> None:
    served = Prometheus(0)
    try:
        served.record("evaluate", 7, {"top-1": 0.25, "top/1": 0.5, "精度": 0.75, "損失": 1.0, "step ": 2.0})
        found = {number.name: number.value for number in served._read()}
    finally:
        served.close()
    assert sorted(found.values()) == [0.25, 0.5, 0.75, 1.0, 2.0, 7.0]
    assert found["penstock_evaluate_step"] == 7.0
    assert (found["penstock_evaluate_top_1"], found["penstock_evaluate_top_1_"]) == (0.25, 0.5)


def test_metrics_that_mlflow_would_call_alike_are_all_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    logged: dict[str, float] = {}

    class Client:
        def log_batch(self, run_id: str, metrics: Any) -> None:
            logged.update((key, value) for key, value, *_ in metrics)

    tracker = MLflow.__new__(MLflow)
    tracker.__dict__.update(_client=Client(), _run_id="1", _metric=lambda *values: values, _has_ended=False)
    tracker.record("evaluate", 7, {"acc@1": 0.25, "acc#1": 0.5})
    assert logged == {"evaluate/acc_1": 0.25, "evaluate/acc_1_": 0.5}
