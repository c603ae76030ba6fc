"""A run on a real Ray cluster loses nothing with processes that die, goes on elsewhere, and leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray_cluster import run_ray
from ray_runs import counts, kill, standing, start, wait_for_batches
from served_runs import recipe_of

from penstock.cli import run as run_command
from penstock.trainer.on_ray.driver import find_weights
from penstock.trainer.server.checkpoints import SavedServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with run_ray(6) as address:
        yield address


@pytest.mark.full
def test_a_worker_a_shard_and_the_coordinator_are_killed_a_shard_joins_and_every_batch_counts_once(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ("--workers=3", "--shards=2", "--trainer.server.replicas=2")
    with start(tmp_path, *options, address=cluster) as process:
        for name, share in (("worker-001", 0.1), ("shard-1", 0.3), ("coordinator", 0.5)):
            kill(wait_for_batches(tmp_path, process, int(480 * share)), name)
        assert run_command(["scale", str(tmp_path / "run"), "--shards=3"]) == 0
        assert process.wait(600) == 0, (tmp_path / "log").read_text()
    assert counts(tmp_path) == [2.0] * 240
    log = (tmp_path / "log").read_text()
    for sentence in ("worker-001 died", "shard-1 started anew, from copies", "the coordinator started anew"):
        assert sentence in log
    (moved,) = re.findall(r"([\d,]+) buckets have moved to 3 shards", log)
    assert 0 < int(moved) <= 1.2 / 3 * 240
    assert run_command(["top", str(tmp_path / "run")]) == 0
    shown = capsys.readouterr().out
    assert "The run has ended." in shown
    assert "shard-1" in shown


@pytest.mark.full
def test_a_stopped_run_goes_on_with_other_numbers_and_a_shard_comes_back_from_its_checkpoint(
    cluster: str, tmp_path: Path
) -> None:
    with start(tmp_path, "--workers=2", "--shards=1", address=cluster) as process:
        wait_for_batches(tmp_path, process, 100)
        process.send_signal(signal.SIGTERM)
        assert process.wait(600) == 0, (tmp_path / "log").read_text()
    assert standing(tmp_path)["state"] == "stopped"
    done = counts(tmp_path)
    assert 100 <= sum(done) < 480
    assert set(done) <= {0.0, 1.0, 2.0}
    with start(tmp_path, "--workers=3", "--shards=3", address=cluster) as process:
        found = wait_for_batches(tmp_path, process, int(sum(done)) + 100)
        holder = max(found["shards"], key=lambda one: int(one["values"]))["name"]  # nobody waits for an empty one
        kill(found, holder)
        assert process.wait(600) == 0, (tmp_path / "log").read_text()
    assert counts(tmp_path) == [2.0] * 240
    assert f"{holder} started anew, from the checkpoint of step" in (tmp_path / "log").read_text()


@pytest.mark.full
def test_ctrl_c_saves_and_leaves_nothing_of_a_cluster_of_its_own(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("pr-*")), set(Path("/dev/shm").iterdir())
    with start(tmp_path, "--workers=1", "--shards=1") as process:
        wait_for_batches(tmp_path, process, 20)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        assert process.wait(600) == 0, (tmp_path / "log").read_text()
        assert not _session(process.pid)
    assert sum(counts(tmp_path)) >= 20
    assert (set(Path("/tmp").glob("pr-*")), set(Path("/dev/shm").iterdir())) == before
    assert "Traceback" not in (tmp_path / "log").read_text()


def _session(leader: int) -> list[str]:
    """The processes of a session that still run."""
    shown = subprocess.run(["ps", "-s", str(leader), "-o", "args="], capture_output=True, text=True, check=False)
    return shown.stdout.splitlines()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--address=127.0.0.1:9"], "no Ray cluster is reachable at 127.0.0.1:9"),
        (["--workers=0"], "--workers=0 must be 1 or more"),
        (["--trainer.server.replicas=2"], "give --shards=2"),
        (["--trainer.server.policy=ssp(-1)"], "staleness=-1 must be 0 or more"),
    ],
    ids=["no cluster", "no workers", "too few shards", "a negative staleness"],
)
def test_what_cannot_work_is_told_before_anything_starts(tmp_path: Path, options: list[str], message: str) -> None:
    with start(tmp_path, *options) as process:
        assert process.wait(300) == 2
    assert message in (tmp_path / "log").read_text()


@pytest.mark.parametrize(
    ("saved", "choice", "expected"),
    [
        (None, "measured", [1.0, 1.0, 1.0]),
        ({"shard-0": 120.0, "shard-1": 60.0}, "measured", [120.0, 60.0, 90.0]),
        ({"shard-0": 120.0, "shard-1": 60.0}, "equal", [1.0, 1.0, 1.0]),
        ({}, "measured", [1.0, 1.0, 1.0]),
    ],
)
def test_measured_weights_of_a_checkpoint_go_on(
    tmp_path: Path, saved: dict[str, float] | None, choice: str, expected: list[float]
) -> None:
    found = None if saved is None else SavedServer(step=1, run={"coordinator": {"shards": saved}}, buckets={})
    weights = find_weights(recipe_of(tmp_path, weights=choice), 3, found)
    assert list(weights.values()) == expected


def test_without_ray_its_extra_is_named(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text("raise ImportError('no module named ray')\n")
    program = "from penstock.storage.ray_cluster import import_ray; import_ray()"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert "pip install penstock[ray]" in done.stderr
