"""The measured process: ``python -m penstock.benchmarks.harness.measure RESULT`` with a job on its standard input.

One contender a process, so that neither peaks nor imports mix. What the contender prints goes to standard error; the
measurement is written to the file RESULT.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.metadata
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ...storage.errors import PenstockError
from ..child_arguments import take_arguments
from ..contenders import Contender, base_of, find_module
from ..peers.catalogue import PEERS
from ..stores.tls_line import trust
from .batch_stats import batch_stats, checksum
from .job import Job, Measurement, Pass
from .process_time import tree_cpu_s, waited_cpu_s
from .subprocesses import REASON


def measure(job: Job) -> Measurement:
    """Run a job in this process."""
    module = find_module(job.contender)
    for name in job.modules:
        with contextlib.suppress(Exception):  # whatever it is, the contender will meet it
            importlib.import_module(name)
    _join_ranks(job)
    os.environ.update(trust(job.storage_options, job.scratch))
    imported = set(sys.modules)
    cpu_before_s = waited_cpu_s()
    started = time.perf_counter()
    contender: Contender = module.open_contender(job)
    try:
        run = _Run(job, contender, started, cpu_before_s)
        run.read()
        report = contender.report()
    finally:
        contender.close()
    late = sorted(name for name, found in sys.modules.items() if name not in imported and found is not None)
    return replace(run.result(cpu_s=waited_cpu_s() - cpu_before_s, report=report), late_modules=late)


class _Run:
    """Reads batches and collects the measurements."""

    def __init__(self, job: Job, contender: Contender, started: float, cpu_before_s: float) -> None:
        self._job = job
        self._contender = contender
        self._started = started
        self._cpu_before_s = cpu_before_s
        self._first_cpu_s = 0.0
        self._first_at = self._last_at = started
        self._waits: list[float] = []
        self._samples: list[int] = []
        self._payload = 0
        self._first_payload = 0
        self._checksum = 0
        self._state: Any = None
        self._passes: list[Pass] = []

    def read(self) -> None:
        passes = 0
        while self._read_epoch():
            passes += 1
            if passes == self._job.epochs:
                return

    def _read_epoch(self) -> bool:
        """Read one pass. Returns False if the run ended before the pass did, or if the pass had nothing."""
        began = self._last_at if self._passes else self._started
        before = sum(self._samples)
        complete = self._read_batches()
        samples = sum(self._samples) - before
        if samples:
            start_s, stop_s = began - self._started, self._last_at - self._started
            cpu_s = tree_cpu_s() - self._cpu_before_s
            self._passes.append(Pass(samples=samples, start_s=start_s, stop_s=stop_s, complete=complete, cpu_s=cpu_s))
        return complete and samples > 0

    def _read_batches(self) -> bool:
        """Read to the end of a pass, or of the run; returns whether the pass ended."""
        job = self._job
        middle = job.num_samples // (2 * job.world_size)
        in_epoch = 0
        asked = time.perf_counter()
        for batch in self._contender.epoch():
            got = time.perf_counter()
            samples, payload = batch_stats(batch)
            if not self._samples:
                self._first_at, self._first_payload = got, payload
                self._first_cpu_s = tree_cpu_s() - self._cpu_before_s
            else:
                self._waits.append(got - asked)
            self._last_at = got
            self._samples.append(samples)
            self._payload += payload
            in_epoch += samples
            if job.mode == "check":
                self._checksum += checksum(batch)
            if job.mode == "first-batch" or (job.seconds is not None and got - self._first_at >= job.seconds):
                return in_epoch * job.world_size >= job.num_samples
            if self._state is None and job.mode == "epoch" and in_epoch >= middle:
                self._state = self._contender.state()
            if job.step_ms:
                time.sleep(job.step_ms / 1000)
            del batch
            asked = time.perf_counter()
        return True

    def result(self, *, cpu_s: float, report: dict[str, Any]) -> Measurement:
        job = self._job
        seconds = self._last_at - self._first_at
        after_first = sum(self._samples[1:])
        waits_ms = np.array(self._waits or [0.0]) * 1000
        return Measurement(
            contender=job.contender,
            mode=job.mode,
            samples=sum(self._samples),
            payload_bytes=self._payload,
            batches=len(self._samples),
            seconds=seconds,
            samples_per_s=after_first / seconds if seconds else 0.0,
            mb_per_s=(self._payload - self._first_payload) / seconds / 1e6 if seconds else 0.0,
            first_batch_s=self._first_at - self._started,
            wait_p50_ms=float(np.percentile(waits_ms, 50)),
            wait_p99_ms=float(np.percentile(waits_ms, 99)),
            wait_share=float(waits_ms.sum() / 1000 / seconds) if seconds else 0.0,
            cpu_s=cpu_s,
            first_batch_cpu_s=self._first_cpu_s,
            passes=self._passes,
            version=_version_of(job.contender),
            checksum=f"{self._checksum & (1 << 64) - 1:016x}" if job.mode == "check" else None,
            bottleneck=report.get("bottleneck"),
            settings=report.get("settings", {}),
            stages=report.get("stages", {}),
            state=self._state,
        )


def _join_ranks(job: Job) -> None:
    """Join several ranks into a process group, as a training job does, and wait for all; nothing for one rank."""
    if job.world_size == 1:
        return
    import torch.distributed as dist

    names = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world_size, "LOCAL_WORLD_SIZE": job.world_size}
    os.environ.update({name: str(value) for name, value in names.items()})
    meeting = Path(job.scratch, "ranks")
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=job.rank, world_size=job.world_size)
    dist.barrier()


def _version_of(contender: str) -> str | None:
    peer = PEERS.get(base_of(contender))
    return importlib.metadata.version(peer.package) if peer is not None else None


def tell(error: Exception) -> int:
    """Print in a line of its own why this process cannot continue; returns its exit code."""
    text = " ".join(str(error).split())
    missing = f"{error.name} is missing or broken ({text})" if isinstance(error, ImportError) else text
    print(f"\n{REASON}{missing}", file=sys.stderr, flush=True)
    return 1


def main() -> None:
    result = Path(*take_arguments("RESULT", "penstock bench"))
    # Whatever a peer prints must not reach the standard output of the tool, which may be JSON.
    os.dup2(2, 1)
    try:
        measurement = measure(Job.from_json(sys.stdin.read()))
    except (PenstockError, ImportError) as exc:
        sys.exit(tell(exc))
    result.write_text(json.dumps(dataclasses.asdict(measurement)))


if __name__ == "__main__":
    main()
