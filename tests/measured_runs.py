"""Measurements as runs of the bench would give them."""

from __future__ import annotations

from typing import Any

from penstock.benchmarks.harness.job import Measurement, Pass


def measured(name: str, passes: list[tuple[int, float, float]], **more: Any) -> Measurement:
    samples = sum(each[0] for each in passes)
    given: dict[str, Any] = {
        "contender": name, "mode": "epoch", "samples": samples, "payload_bytes": 10 * samples, "batches": 4,
        "seconds": 2.0, "samples_per_s": 70.0, "mb_per_s": 1.0, "first_batch_s": 0.5, "wait_p50_ms": 1.0,
        "wait_p99_ms": 2.0, "wait_share": 0.5, "cpu_s": 0.02, "peak_bytes": 1 << 20, "peak_rss_bytes": 2 << 20,
        "passes": [
            Pass(samples=n, start_s=start, stop_s=stop, complete=True, cpu_s=60e-6 * n) for n, start, stop in passes
        ],
    }  # fmt: skip
    return Measurement(**given | more)
