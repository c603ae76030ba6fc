"""Measure passes over a real S3 server behind a line that adds a delay.

Each pass runs in a process of its own, and the delays take turns, so that what else the machine does falls on all. They
are compared with a delay of 0 through the same proxy; what the proxy costs shows beside the server without it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.benchmarks.stores.delay_line import delay_line
from penstock.benchmarks.stores.server import make_bucket, serve_s3
from penstock.loader import DistributedDataLoader, TokensFormat, open_manifest
from penstock.loader.dataset.manifest import MANIFEST_NAME
from penstock.loader.formats.shard import ShardFormat
from penstock.loader.reading.checksum import sum_chunks
from penstock.storage import open_store

from .arguments import OptionalPath, parse_config
from .first_pass import Config as DataConfig
from .first_pass import write_data

_BUCKET, _SEQ_LEN, _BATCH = "penstock-delayed", 2048, 64
_WANTED = {0: 1.0, 20: 0.9, 100: 0.8}
_PASS = "import json, sys; from devtools.delayed import read_once; print(json.dumps(read_once(*sys.argv[1:])))"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Passes over raw bytes (38 kB in tar) and tokens (2,048) from S3, with a delay added to each request.

    Wanted: with 20 ms at least 0.9 of the throughput without, with 100 ms 0.8; and from a manifest the first batch
    within 0.3 s and two round trips.
    """

    delays_ms: tuple[int, ...] = (0, 20, 100)
    """Delays of each request, and of each new connection."""

    rounds: int = 5
    """Passes of each case and delay."""

    blobs: int = 8_000
    """Samples of the raw bytes."""

    sequences: int = 65_536
    """Sequences of tokens."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def read_once(case: str, endpoint: str) -> dict[str, float]:
    """One pass in this process, from the manifest, which is loaded before; seconds count from the loader's making."""
    options = {"endpoint": endpoint, "access_key": os.environ["BENCH_KEY"], "secret_key": os.environ["BENCH_SECRET"]}
    started = time.perf_counter()
    manifest = open_manifest(f"s3://{_BUCKET}/{case}", storage_options=options)
    opened_s = time.perf_counter() - started
    kind: dict[str, Any] = {"format": TokensFormat(seq_len=_SEQ_LEN)} if case == "tokens" else {"decode": None}
    cpu, started = time.process_time(), time.perf_counter()
    first_s, samples = 0.0, 0
    with DistributedDataLoader(manifest, batch_size=_BATCH, seed=3, storage_options=options, **kind) as loader:
        for batch in loader:
            first_s = first_s or time.perf_counter() - started
            samples += len(batch["tokens" if case == "tokens" else "jpg"])
        seconds = time.perf_counter() - started
        metrics = loader.metrics()
    return {
        "samples_per_s": samples / seconds,
        "first_batch_s": first_s,
        "manifest_s": opened_s,
        "cpu_us_per_sample": 1e6 * (time.process_time() - cpu) / samples,
        "fetch_threads": metrics.fetch_threads,
        "requests": metrics.requests,
        "hedges": metrics.hedges,
    }


def fill_bucket(
    bucket: str, folder: Path, formats: Mapping[str, ShardFormat | None], options: Mapping[str, str]
) -> None:
    """Make a bucket of some of a folder's data sets, each with a manifest that has checksums."""
    make_bucket(bucket, options)
    for case, kind in formats.items():
        url = f"s3://{bucket}/{case}"
        source, target = open_store(folder / case), open_store(url, storage_options=options)
        try:
            for info in source.list():
                if info.key != MANIFEST_NAME:
                    target.put(info.key, source.get(info.key))
            manifest = open_manifest(url, storage_options=options, format=kind, progress=False)
            summed = sum_chunks(manifest, storage_options=options, progress=False)
            target.put(MANIFEST_NAME, summed.to_bytes())
        finally:
            source.close()
            target.close()


def _measure(case: str, endpoint: str, options: Mapping[str, str]) -> dict[str, float]:
    keys = {"BENCH_KEY": options["access_key"], "BENCH_SECRET": options["secret_key"]}
    command = [sys.executable, "-c", _PASS, case, endpoint]
    done = subprocess.run(command, env={**os.environ, **keys}, check=True, capture_output=True, text=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(config: Config) -> None:
    passes: dict[str, dict[str, list[dict[str, float]]]] = {"raw": {}, "tokens": {}}
    with serve_s3(plain_http=True) as options, tempfile.TemporaryDirectory() as scratch, ExitStack() as lines:
        data = DataConfig(before=Path(), blobs=config.blobs, sequences=config.sequences)
        write_data(Path(scratch), data)
        formats = {"raw": None, "tokens": TokensFormat(seq_len=_SEQ_LEN)}
        fill_bucket(_BUCKET, Path(scratch), formats, options)
        endpoints = {"no proxy": options["endpoint"]}
        for delay in dict.fromkeys((0, *config.delays_ms)):
            endpoints[f"{delay} ms"] = lines.enter_context(delay_line(options["endpoint"], delay / 1000))
        for number in range(config.rounds):
            order = list(endpoints.items())
            for name, endpoint in order if number % 2 else order[::-1]:
                for case, found in passes.items():
                    found.setdefault(name, []).append(_measure(case, endpoint, options))
    summary = {case: _summarise({name: found[name] for name in endpoints}) for case, found in passes.items()}
    for case, lines_of_case in summary.items():
        print(case)
        for name, values in lines_of_case.items():
            print(
                f"  {name:9} {values['samples_per_s']:8,.0f} samples/s  {values['ratio']:.2f} of 0 ms"
                f"  first batch {values['first_batch_s']:.2f} s  {values['fetch_threads']:.0f} at a time"
            )
    if config.out is not None:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()}
        command = " ".join(["python -m devtools delayed", *sys.argv[1:]])
        result = {"command": command, "machine": machine, "wanted": _WANTED, "medians": summary, "passes": passes}
        config.out.write_text(json.dumps(result, indent=1) + "\n")


def _summarise(found: Mapping[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians of each delay; ``ratio`` is the median over the rounds of the throughput against that of 0 ms."""
    summary = {}
    for name, measured in found.items():
        medians = {unit: float(np.median([one[unit] for one in measured])) for unit in measured[0]}
        pairs = zip(measured, found["0 ms"], strict=True)
        summary[name] = medians | {
            "ratio": float(np.median([a["samples_per_s"] / b["samples_per_s"] for a, b in pairs]))
        }
    return summary


if __name__ == "__main__":
    main(parse_config(Config))
