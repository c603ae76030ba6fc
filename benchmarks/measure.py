"""The measured process: ``python -m penstock.benchmarks.measure RESULT`` with a job on its standard input.

One contender a process, so that neither peaks nor imports mix. What the contender prints goes to standard error; the
measurement is written to the file RESULT.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from ..storage.errors import PenstockError
from .batch_stats import batch_stats, checksum
from .contenders import Contender, find_module
from .job import Job, Measurement
from .subprocesses import TOLD


def measure(job: Job) -> Measurement:
    """Run a job in this process."""
    module = find_module(job.contender)
    cpu_before_s = _cpu_s()
    started = time.perf_counter()
    contender: Contender = module.open_contender(job)
    try:
        run = _Run(job, contender, started)
        run.read()
        report = contender.report()
    finally:
        contender.close()
    return run.result(cpu_s=_cpu_s() - cpu_before_s, report=report)


class _Run:
    """Reads batches and collects the measurements."""

    def __init__(self, job: Job, contender: Contender, started: float) -> None:
        self._job = job
        self._contender = contender
        self._started = started
        self._first_at = self._last_at = started
        self._waits: list[float] = []
        self._samples: list[int] = []
        self._payload = 0
        self._first_payload = 0
        self._checksum = 0
        self._state: Any = None

    def read(self) -> None:
        passes = 0
        while self._read_epoch():
            passes += 1
            if passes == self._job.epochs:
                return

    def _read_epoch(self) -> bool:
        """Read one pass. Returns False if the run ended before the pass did."""
        job = self._job
        middle = job.num_samples // 2
        in_epoch = 0
        asked = time.perf_counter()
        for batch in self._contender.epoch():
            got = time.perf_counter()
            samples, payload = batch_stats(batch)
            if not self._samples:
                self._first_at, self._first_payload = got, payload
            else:
                self._waits.append(got - asked)
            self._last_at = got
            self._samples.append(samples)
            self._payload += payload
            in_epoch += samples
            if job.mode == "check":
                self._checksum += checksum(batch)
            if job.mode == "first-batch" or (job.seconds is not None and got - self._first_at >= job.seconds):
                return False
            if self._state is None and job.mode == "epoch" and in_epoch >= middle:
                self._state = self._contender.state()
            if job.step_ms:
                time.sleep(job.step_ms / 1000)
            del batch
            asked = time.perf_counter()
        return in_epoch > 0

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
            checksum=f"{self._checksum & (1 << 64) - 1:016x}" if job.mode == "check" else None,
            bottleneck=report.get("bottleneck"),
            settings=report.get("settings", {}),
            stages=report.get("stages", {}),
            state=self._state,
        )


def _cpu_s() -> float:
    """CPU time of this process and of the children that it has waited for."""
    both = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def tell(error: Exception) -> int:
    """Say in a line of its own why this process cannot go on; returns its exit code."""
    text = " ".join(str(error).split())
    missing = f"{error.name} is missing or broken ({text})" if isinstance(error, ImportError) else text
    print(f"\n{TOLD}{missing}", file=sys.stderr, flush=True)
    return 1


def main() -> None:
    result = Path(sys.argv[1])
    # Whatever a peer prints must not reach the standard output of the tool, which may be JSON.
    os.dup2(2, 1)
    try:
        measurement = measure(Job.from_json(sys.stdin.read()))
    except (PenstockError, ImportError) as exc:
        sys.exit(tell(exc))
    result.write_text(json.dumps(dataclasses.asdict(measurement)))


if __name__ == "__main__":
    main()
