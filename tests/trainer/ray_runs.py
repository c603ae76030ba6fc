"""Runs on a Ray cluster: a recipe that counts, its processes by name, and what its servers saved."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from served_runs import MODULE
from started_process import started_process
from torch import Tensor

from penstock.storage import open_store
from penstock.trainer.server import snapshots
from penstock.trainer.server.checkpoints import find_newest, read_buckets

HERE = Path(__file__).parent
RECIPE = f"""
[model]
use = "{MODULE}:Tallies"
args = {{ batches = 240 }}

[optimizer]
use = "torch.optim:SGD"
args = {{ lr = 1.0 }}

[loss]
use = "slow_counting:count_slowly"

[data]
use = "{MODULE}:make_batches"
args = {{ count = 240 }}

[trainer]
epochs = 2
device = "cpu"

[trainer.parallel]
mode = "parameter_server"

[trainer.precision]
dtype = "fp32"
"""


@contextmanager
def start(
    folder: Path, *options: str, address: str | None = None, recipe: str = RECIPE
) -> Iterator[subprocess.Popen[str]]:
    """Start a run of the recipe in a process; its messages go to ``folder``/log."""
    folder.mkdir(exist_ok=True)
    path = folder / "recipe.toml"
    path.write_text(recipe)
    where = [] if address is None else [f"--address={address}"]
    command = [sys.executable, "-m", "penstock.trainer", str(path), "--ray", *where, *options]
    command += [f"--trainer.output_dir={folder / 'run'}"]
    environment = {**os.environ, "PYTHONPATH": str(HERE), "OMP_NUM_THREADS": "1"}
    with (
        (folder / "log").open("a") as log,
        started_process(command, env=environment, cwd=HERE, stdout=log, stderr=subprocess.STDOUT) as process,
    ):
        yield process


def standing(folder: Path) -> dict[str, Any]:
    """What the run told of itself last; empty before it did."""
    with suppress(OSError, ValueError):
        found: dict[str, Any] = json.loads((folder / "run" / "ranks" / "servers.json").read_bytes())
        return found
    return {}


def wait_for_batches(folder: Path, process: subprocess.Popen[str], count: int) -> dict[str, Any]:
    """Wait until so many batches count."""
    while (now := standing(folder)).get("batches", -1) < count:
        assert process.poll() is None, (folder / "log").read_text()
        time.sleep(0.1)
    return now


def kill(found: Mapping[str, Any], name: str) -> None:
    """Kill a process of the run by SIGKILL."""
    pids = {one["name"]: one["pid"] for one in (*found["shards"], *found["workers"])}
    os.kill({**pids, "coordinator": found["coordinator_pid"]}[name], signal.SIGKILL)


def counts(folder: Path) -> list[float]:
    """How often each batch counted, by what the servers saved last."""
    store = open_store(str(folder / "run" / "checkpoints" / "servers"))
    notes: list[str] = []
    saved = find_newest(store, notes.append)
    assert saved is not None, notes
    parts: dict[int, Tensor] = {}
    for place, data in read_buckets(store, saved, saved.buckets):
        bucket = snapshots.restore(data, run=saved.run["run"], schema=saved.run["schema"], place=place)
        parts |= {int(name.removeprefix("counts.")): piece.values[0] for (name, _), piece in bucket.pieces.items()}
    return (-torch.cat([parts[index] for index in sorted(parts)])).tolist()
