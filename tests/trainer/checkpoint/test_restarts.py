"""Killed and stopped runs on the loader, under torchrun: the next start goes on, and each sample comes exactly once."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from launch import run_ranks, start_ranks
from tar_rows import read_starts, write_shards

from penstock import audit

SCRIPT = Path(__file__).parents[1] / "restarted_run.py"
SAMPLES, STEPS = 60, 30  # three epochs of ten steps
NEVER = "1000"


def assert_each_sample_once(folder: Path) -> None:
    report = audit(folder / "audit")
    assert len(report.attempts) == 2
    assert [(account.delivered, account.missing, account.duplicated) for account in report.epochs] == [
        (SAMPLES, 0, 0)
    ] * 3


def test_a_rank_killed_in_mid_epoch_is_restarted_and_each_sample_comes_exactly_once(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", samples=SAMPLES)
    done = run_ranks(SCRIPT, 2, str(tmp_path), "18", NEVER, options=("--max-restarts=1",))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    starts = read_starts(tmp_path)
    assert sorted(start[:2] for start in starts) == [(0, 2), (0, 2), (1, 2), (1, 2)]
    assert {start[2] for start in starts[2:]} <= {10, 15}  # the save of step 15 may have been under way
    assert f"rank 1 ends at step {STEPS}, stopped early: False" in done.stdout
    assert_each_sample_once(tmp_path)


@pytest.mark.full
def test_sigterm_to_torchrun_during_evaluation_saves_ends_clean_and_is_gone_on_from(tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", samples=SAMPLES)
    with start_ranks(SCRIPT, 2, str(tmp_path), NEVER, "13") as running:
        deadline = time.monotonic() + 120.0
        while not all((tmp_path / f"evaluating-{rank}").exists() for rank in range(2)):
            assert time.monotonic() < deadline
            assert running.poll() is None, running.communicate()[0]
            time.sleep(0.05)
        running.send_signal(signal.SIGTERM)
        said, _ = running.communicate(timeout=120)
    for rank in range(2):
        assert f"rank {rank} ends at step 13, stopped early: True" in said
    assert "Error" not in said.replace("SignalException", ""), said
    (tmp_path / "hurry").touch()
    done: subprocess.CompletedProcess[str] = run_ranks(SCRIPT, 2, str(tmp_path), NEVER, "13")
    assert done.returncode == 0, done.stderr[-6000:]
    assert [start[2] for start in read_starts(tmp_path)] == [0, 0, 13, 13]
    assert_each_sample_once(tmp_path)
