"""The slowdown of a training loop beside each way of feeding it: a step's launches, and its wait for a batch.

The loop starts thousands of tiny operations a step, as a model that is bound by launches does, and comes for the next
batch at a fixed rate that every loader can keep up with. Runs in the measured process, see feeding.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from penstock.benchmarks.contenders import find_module
from penstock.benchmarks.harness.job import Job
from penstock.loader import DistributedDataLoader, ImageDecoder
from penstock.storage import PenstockError

_WARM_STEPS, _WARM_S = 5, 3.0  # what is read ahead, and what a loader starts later, is there then
_OPERATIONS = 3000
_FOREIGN = "from devtools.gpu.interference import decode_endlessly; decode_endlessly({!r}, {}, {})"


@dataclass(frozen=True, kw_only=True)
class Interference:
    """``steps`` steps of a loop, one each ``period_s``, that takes ``rows`` decoded images for each.

    ``way``: "nothing" feeds it; "foreign": nothing, and a process of its own decodes as many images on other cores;
    "threads", "processes" or "device": by this package, decoded there; "process": by its pipeline in a process beside
    the loop; "peer": the loader of ``job``.
    """

    way: str
    device: str
    url: str
    rows: int
    steps: int
    period_s: float
    processes: int
    job: Mapping[str, Any] | None = None


def run_interference(asked: Interference) -> dict[str, float]:
    """Measure milliseconds of a step's launches, and of its wait for a batch: median and 90th percentile."""
    device = torch.device(asked.device)
    torch.set_num_threads(1)
    launch = _make_launches(device)
    launches, waits = [], []
    warm_steps = max(_WARM_STEPS, int(_WARM_S / asked.period_s))
    with _feed(asked, device) as batches:
        next(batches)
        due = time.perf_counter()
        for step in range(warm_steps + asked.steps):
            due += asked.period_s
            begun = time.perf_counter()
            next(batches)
            taken = time.perf_counter()
            launch()
            launched = time.perf_counter()
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            if step >= warm_steps:
                waits.append(1e3 * (taken - begun))
                launches.append(1e3 * (launched - taken))
            time.sleep(max(0.0, due - time.perf_counter()))
    return {
        "launches_ms": statistics.median(launches),
        "launches_p90_ms": _ninetieth(launches),
        "wait_ms": statistics.median(waits),
        "wait_p90_ms": _ninetieth(waits),
    }


def _ninetieth(values: list[float]) -> float:
    return sorted(values)[int(0.9 * (len(values) - 1))]


def _make_launches(device: torch.device) -> Callable[[], None]:
    values = torch.ones(16, device=device)

    def launch() -> None:
        for _ in range(_OPERATIONS):
            values.mul_(1.0)

    return launch


@contextlib.contextmanager
def _feed(asked: Interference, device: torch.device) -> Iterator[Iterator[Any]]:
    if asked.way in ("nothing", "foreign"):
        code = _FOREIGN.format(asked.url, asked.rows, asked.period_s)
        process = subprocess.Popen([sys.executable, "-c", code]) if asked.way == "foreign" else None
        try:
            time.sleep(0.0 if process is None else 5.0)  # its imports are over then
            yield iter(lambda: 0, 1)
        finally:
            if process is not None:
                process.kill()
                process.wait()
    elif asked.way == "peer":
        assert asked.job is not None
        job = Job(**asked.job)
        contender = find_module(job.contender).open_contender(job)
        try:
            yield _endless(contender.epoch)
        finally:
            contender.close()
    else:
        with open_loader(asked.url, asked.rows, asked.way, asked.processes, device) as loader:
            yield _endless(lambda: iter(loader))


def open_loader(url: str, rows: int, way: str, processes: int, device: torch.device) -> DistributedDataLoader:
    """Open a loader of images that are decoded by "threads", "processes" or on the "device"."""
    decoder = ImageDecoder(size=224, crop="random", flip=0.5, device="cuda" if way == "device" else None)
    return DistributedDataLoader(
        url,
        batch_size=rows,
        decode={"jpg": decoder},
        device=device if device.type == "cuda" else None,
        processes=processes if way == "processes" else 0,
        place="process" if way == "process" else "threads",
    )


def _endless(epoch: Callable[[], Iterator[Any]]) -> Iterator[Any]:
    while True:
        found = False
        for batch in epoch():
            found = True
            yield batch
        if not found:
            raise PenstockError("the data set has no full batch")


def decode_endlessly(url: str, rows: int, period_s: float) -> None:
    """Decode a batch each ``period_s``, until killed: the work of a foreign process."""
    with open_loader(url, rows, "threads", 0, torch.device("cpu")) as loader:
        due = time.perf_counter()
        for _ in _endless(lambda: iter(loader)):
            due += period_s
            time.sleep(max(0.0, due - time.perf_counter()))
