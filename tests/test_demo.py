"""The demo, for real: torchrun, SIGKILL, resume on fewer ranks, audit; and Ctrl-C in the middle of it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest
from started_process import started_process

from penstock import audit

pytestmark = pytest.mark.skipif(find_spec("sklearn") is None, reason="install penstock[demo] for the digits")

DEMO = Path(__file__).parents[1] / "examples" / "demo" / "run.py"
EPOCHS = 6


def start_demo(folder: Path, *arguments: str) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, str(DEMO), "--folder", str(folder), *arguments]
    return started_process(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def running_ranks(folder: Path) -> list[int]:
    """The processes whose command line names the demo's folder."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if int(entry.name) != os.getpid() and str(folder).encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
    return found


@pytest.mark.timeout(600)
def test_demo_survives_a_killed_rank_and_accounts_for_every_sample(tmp_path: Path) -> None:
    with start_demo(tmp_path / "run", "--epochs", str(EPOCHS)) as demo:
        shown, _ = demo.communicate(timeout=570)
    logs = "\n".join(path.read_text() for path in sorted((tmp_path / "run").glob("*.log")))
    assert demo.returncode == 0, shown + logs
    assert "\x1b" not in shown  # colours are for terminals
    assert "kill -9 of rank 1" in shown
    assert "kill -9 of rank 1's loader process" in shown
    assert re.search(r"rank 1: loader process \d+ was killed by SIGKILL", shown)

    report = audit(tmp_path / "run" / "audit")
    assert report.is_exact
    assert [world_size for world_size, _, _ in report.attempts] == [3, 2, 2]
    # The last checkpoints before the kills: after 10 global batches of 48, each 10.
    assert report.attempts[1] == (2, EPOCHS // 3, 480)
    assert report.attempts[2][1] == 2 * EPOCHS // 3
    assert [(account.epoch, account.delivered) for account in report.epochs] == [(e, 1437) for e in range(EPOCHS)]
    replayed = {account.epoch: account.replayed for account in report.epochs if account.replayed}
    assert list(replayed) == [EPOCHS // 3, 2 * EPOCHS // 3]
    assert all(0 < samples <= 10 * 48 for samples in replayed.values())


@pytest.mark.full
@pytest.mark.timeout(600)
def test_ctrl_c_ends_the_demo_and_all_that_it_started(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with start_demo(folder, "--epochs", "1000") as demo:
        until = time.monotonic() + 300
        while not list(folder.glob("audit/*")):  # a rank has its loader, and trains
            assert demo.poll() is None
            assert time.monotonic() < until
            time.sleep(0.1)
        assert len(running_ranks(folder)) >= 3
        demo.send_signal(signal.SIGINT)
        shown, _ = demo.communicate(timeout=120)
        assert demo.returncode == 130
        assert "interrupted" in shown
        assert running_ranks(folder) == []


def test_demo_says_what_is_wrong_with_its_arguments(tmp_path: Path) -> None:
    with start_demo(tmp_path, "--store", "bucket") as demo:
        shown, _ = demo.communicate(timeout=120)
    assert demo.returncode == 2
    assert "s3://bucket/prefix" in shown
