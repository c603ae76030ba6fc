"""``penstock top`` of a run over a parameter server."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import run
from penstock.trainer.report.status.servers import (
    NAME,
    ServersStatus,
    ShardStatus,
    WorkerStatus,
    read_servers,
    write_servers,
)

STATUS = ServersStatus(
    time=0.0,
    every_s=1.0,
    state="training",
    policy="ssp(4)",
    step=120,
    total_steps=500,
    epoch=1,
    batches=360,
    total_batches=1500,
    metrics={"accuracy": 0.975},
    saved_step=100,
    shards=[
        ShardStatus(
            name="shard-0",
            version=361,
            values=58_506,
            requests=1234,
            bytes_in=5 << 20,
            bytes_out=3 << 20,
            share=0.25,
            mb_per_s=118.3,
        ),
        ShardStatus(name="shard-1", is_answering=False, version=12, starts=2),
    ],
    workers=[
        WorkerStatus(name="worker-000", clock=124, waits_for=["worker-001"], leases=1),
        WorkerStatus(
            name="worker-001", clock=120, behind=4, waits_for=[], starts=2, silent_s=3.0, numbers={"loss_sum": 1.5}
        ),
    ],
)


def shown(folder: Path, status: ServersStatus, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    write_servers(folder, status)
    assert run(["top", str(folder), *options]) == 0
    return capsys.readouterr().out


def test_shards_and_workers_have_a_row_each_and_who_is_waited_for_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(tmp_path, replace(STATUS, time=time.time()), capsys)
    rows = {line.split()[0]: line.split()[1:] for line in text.splitlines() if line}
    assert "step 120 of 500" in text
    assert "accuracy 0.975" in text
    assert rows["shard-0"][:4] == ["361", "58,506", "0", "1,234"]
    assert rows["shard-0"][-2:] == ["25%", "118"]
    assert rows["worker-000"][0] == "124"
    assert rows["worker-000"][-1] == "worker-001"
    assert rows["worker-001"][:2] == ["120", "4"]
    assert "shard-1 gives no answer" in text
    assert "1 worker waits for worker-001, the slowest" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"state": "ended"}, "The run has ended."),
        ({"state": "stopped"}, "stopped after step 120. The last save is of step 100."),
        ({"state": "failed", "error": "no memory"}, "The run failed: no memory."),
        ({"time": 1.0}, "Its driver has been silent for"),
    ],
)
def test_a_run_that_does_not_train_says_why(
    changes: dict[str, object], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = replace(STATUS, **{"time": time.time(), **changes})  # type: ignore[arg-type]
    assert message in shown(tmp_path, status, capsys)
    found = json.loads(shown(tmp_path, status, capsys, "--json"))
    assert not found["running"]
    assert found["servers"]["workers"][1]["numbers"] == {"loss_sum": 1.5}


@pytest.mark.parametrize("text", ["", "[]", '{"version": 99}', '{"version": 1, "shards": 3}', '{"version": 1}'])
def test_what_is_no_status_is_none(text: str, tmp_path: Path) -> None:
    write_servers(tmp_path, STATUS)
    assert read_servers(tmp_path) == STATUS
    (tmp_path / "ranks" / NAME).write_text(text)
    assert read_servers(tmp_path) is None
