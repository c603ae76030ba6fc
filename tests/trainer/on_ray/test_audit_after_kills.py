"""Workers, shards and the coordinator are killed, some while buckets move: every sample is delivered once."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray_cluster import run_ray
from ray_runs import kill, standing, start, wait_for_batches

from penstock.cli import run as run_command
from penstock.loader import pack

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]

SAMPLES, BATCH, EPOCHS, WIDTH = 960, 8, 2, 6
RECIPE = """
[model]
use = "audited:Parts"
args = {{ width = {width} }}

[optimizer]
use = "torch.optim:SGD"
args = {{ lr = 0.004 }}

[loss]
use = "audited:squares_slowly"

[data]
use = "penstock:DistributedDataLoader"
args = {{ source = "{data}", batch_size = {batch}, seed = 0, audit_dir = "{logs}" }}

[evaluation]
use = "audited:measure"

[evaluation.data]
use = "penstock:DistributedDataLoader"
args = {{ source = "{data}", global_batch_size = 120, shuffle = false }}

[trainer]
epochs = {epochs}
device = "cpu"

[trainer.parallel]
mode = "parameter_server"

[trainer.precision]
dtype = "fp32"
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    with run_ray(6) as address:
        yield address


def scale(folder: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock.cli", "scale", str(folder / "run"), *options]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_for_shard(folder: Path, process: subprocess.Popen[str], name: str) -> dict[str, Any]:
    """Wait until a shard has a process."""
    while True:
        found = standing(folder)
        if name in {one["name"] for one in found.get("shards", ())}:
            return found
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.05)


def test_the_audit_is_clean_after_kills_of_everything_also_while_buckets_move(
    cluster: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draws = np.random.default_rng(0)
    rows = [{"__key__": f"{n:04d}", "x.npy": draws.normal(size=WIDTH).astype(np.float32)} for n in range(SAMPLES)]
    data, logs = tmp_path / "data", tmp_path / "logs"
    pack(rows, str(data), shard_bytes=20_000, progress=False)
    recipe = RECIPE.format(width=WIDTH, data=data, logs=logs, batch=BATCH, epochs=EPOCHS)
    batches = EPOCHS * SAMPLES // BATCH
    options = ("--workers=2", "--shards=2", "--trainer.server.replicas=2")
    with start(tmp_path, *options, address=cluster, recipe=recipe) as process:
        kill(wait_for_batches(tmp_path, process, batches // 10), "worker-001")
        wait_for_batches(tmp_path, process, batches // 5)
        with scale(tmp_path, "--shards=3") as command:
            kill(wait_for_shard(tmp_path, process, "shard-2"), "shard-2")
            kill(standing(tmp_path), "coordinator")
            assert command.wait(300) == 0, command.communicate()
        now = wait_for_batches(tmp_path, process, batches // 2)
        assert {one["name"] for one in now["shards"]} == {"shard-0", "shard-1", "shard-2"}
        with scale(tmp_path, "--shards=2", "--workers=3") as command:
            kill(now, "shard-0")
            assert command.wait(300) == 0, command.communicate()
        assert process.wait(600) == 0, (tmp_path / "log").read_text()
    assert run_command(["audit", str(logs)]) == 0
    shown = capsys.readouterr().out
    assert "every sample reached was delivered exactly once" in shown
    totals = [line.split() for line in shown.splitlines() if line.split()[:1] in [[str(n)] for n in range(EPOCHS)]]
    table = [[int(one.replace(",", "")) for one in line] for line in totals if len(line) == 7]
    assert [line[0] for line in table] == list(range(EPOCHS))
    assert all(line[1:6] == [SAMPLES, SAMPLES, SAMPLES, 0, 0] for line in table)
    log = (tmp_path / "log").read_text()
    for sentence in ("worker-001 died", "the coordinator started anew", "buckets have moved to 3 shards"):
        assert sentence in log
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = [one["loss"] for one in records if one["kind"] == "evaluate"]
    assert len(losses) == EPOCHS
    assert losses[-1] < 0.05 * WIDTH  # of the variance of what is to be learnt
