"""The measured process: ``python -m devtools.gpu.feeding RESULT``, with its job on standard input.

One loader feeds one training loop. Nothing else runs in the process, so that neither memory nor imports mix.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from penstock.benchmarks.child_arguments import take_arguments
from penstock.benchmarks.contenders import find_module
from penstock.benchmarks.harness.job import Job
from penstock.benchmarks.harness.measure import tell
from penstock.loader import DistributedDataLoader
from penstock.loader.formats.detect import make_format
from penstock.loader.pipeline.device import DeviceFeeder
from penstock.storage.errors import PenstockError
from penstock.trainer.report.flops import find_peak

from .decoding import Decoding, run_decoding
from .interference import Interference, open_loader, run_interference
from .models import Model, TrainStep, make_batch

_WARM_STEPS, _WARM_S = 3, 3.0  # what is read ahead, and what a loader starts later, is there then


@dataclass(frozen=True, kw_only=True)
class Feeding:
    """``seconds`` of training ``model`` on the batches of ``job``'s loader, pass after pass.

    With ``way``: on those of this package's, which decodes by "threads", "processes" or on the "device". Without a job
    one made-up batch of ``rows`` stays on the device: the upper limit for any loader.
    """

    model: Model
    device: str
    rows: int
    seconds: float
    is_small: bool = False
    job: Mapping[str, Any] | None = None
    way: str | None = None
    processes: int = 0


def run_feeding(asked: Feeding) -> dict[str, Any]:
    """Measure samples per second after the first steps, and the share of that time spent waiting for batches."""
    device = torch.device(asked.device)
    step = TrainStep(asked.model, device, is_small=asked.is_small)
    started = time.perf_counter()
    if asked.job is None:
        batch = make_batch(asked.model, asked.rows, device)
        return _train(step, lambda: iter([batch] * 64), asked.seconds, started)
    job = Job(**asked.job)
    if asked.way is not None:
        with open_loader(str(job.url), asked.rows, asked.way, asked.processes, device) as loader:
            return _train(step, lambda: iter(loader), asked.seconds, started)
    contender = find_module(job.contender).open_contender(job)
    try:
        result = _train(step, contender.epoch, asked.seconds, started)
        report = contender.report()
    finally:
        contender.close()
    return result | {"settings": report.get("settings", {}), "bottleneck": report.get("bottleneck")}


def _train(step: TrainStep, epoch: Callable[[], Iterator[Any]], seconds: float, started: float) -> dict[str, Any]:
    waits, samples, steps, warm_steps, flops = 0.0, 0, 0, 0, 0.0
    first_s = first_at = counted_from = 0.0
    while True:
        in_pass = 0
        asked = time.perf_counter()
        for batch in epoch():
            got = time.perf_counter()
            rows = step(batch)
            done = time.perf_counter()
            flops = flops or step.flops_of_row(batch)
            first_s, first_at = first_s or got - started, first_at or got
            steps, in_pass = steps + 1, in_pass + 1
            if not counted_from:
                if steps >= _WARM_STEPS and done - first_at >= _WARM_S:
                    counted_from, warm_steps = done, steps
            else:
                waits, samples = waits + got - asked, samples + rows
                if done - counted_from >= seconds:
                    spent = done - counted_from
                    peak = find_peak(step.device, "bf16")
                    return {
                        "samples_per_s": samples / spent,
                        "tokens_per_s": samples * step.tokens_of_row / spent,
                        "mfu": samples * flops / spent / peak if peak else None,
                        "wait_share": waits / spent,
                        "steps": steps - warm_steps,
                        "step_ms": 1e3 * (spent - waits) / (steps - warm_steps),
                        "first_batch_s": first_s,
                        "device_peak_bytes": _device_peak(step.device),
                    }
            asked = time.perf_counter()
        if not in_pass:
            raise PenstockError("the data set has no full batch")


def _device_peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0


@dataclass(frozen=True, kw_only=True)
class Copying:
    """Batches of tokens to the device: the loader's copies against bare ones out of one pinned buffer."""

    device: str
    url: str
    rows: int
    seconds: float
    job: Mapping[str, Any]


def run_copying(asked: Copying) -> dict[str, float]:
    """Measure bytes per second to the device: of bare pinned copies, the ring of buffers, and the whole loader."""
    device = torch.device(asked.device)
    values = torch.randint(0, 50_257, (asked.rows, 2048))
    pinned = values.pin_memory()

    def copy_bare() -> int:
        pinned.to(device, non_blocking=True)
        torch.cuda.synchronize(device)
        return pinned.nbytes

    feeder = DeviceFeeder(device)
    batch = {"tokens": values}

    def copy_staged() -> int:
        feeder.stage(batch).take()
        torch.cuda.synchronize(device)
        return values.nbytes

    result = {"bare_bytes_per_s": _rate(copy_bare, asked.seconds)}
    result["ring_bytes_per_s"] = _rate(copy_staged, asked.seconds)
    feeder.close()
    job = Job(**asked.job)
    shards = None if job.format is None else make_format(job.format, job.format_config)
    with DistributedDataLoader(asked.url, batch_size=asked.rows, device=device, format=shards) as loader:
        batches = _endless(loader)

        def copy_loaded() -> int:
            taken = next(batches)
            torch.cuda.synchronize(device)
            return sum(one.nbytes for one in taken.values())

        result["loader_bytes_per_s"] = _rate(copy_loaded, asked.seconds)
    return result


def _endless(loader: DistributedDataLoader) -> Iterator[Any]:
    while True:
        yield from loader


def _rate(copy: Callable[[], int], seconds: float) -> float:
    for _ in range(_WARM_STEPS):
        copy()
    total, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < seconds:
        total += copy()
    return total / spent


def main() -> None:
    result_path = Path(*take_arguments("RESULT", "python -m devtools gpu"))
    asked = json.loads(sys.stdin.read())
    kind = asked.pop("kind")
    os.dup2(2, 1)  # a peer's prints are no result
    try:
        run, kind_of = _RUNS[kind]
        result: dict[str, Any] = run(kind_of(**asked))
    except (PenstockError, ImportError) as exc:
        sys.exit(tell(exc))
    result_path.write_text(json.dumps(result))


Asked = Feeding | Copying | Decoding | Interference
_RUNS: Mapping[str, tuple[Callable[[Any], dict[str, Any]], type[Asked]]] = {
    "copying": (run_copying, Copying),
    "decoding": (run_decoding, Decoding),
    "feeding": (run_feeding, Feeding),
    "interference": (run_interference, Interference),
}


def message_of(asked: Asked) -> str:
    kind = next(name for name, (_, of_kind) in _RUNS.items() if type(asked) is of_kind)
    return json.dumps({"kind": kind, **asdict(asked)})


if __name__ == "__main__":
    main()
