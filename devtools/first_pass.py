"""First passes over data, local or in S3, two checkouts in turn.

Each pass runs in a process of its own, so that nothing is warm but the file system's cache, and the two checkouts take
turns, each first in every other round, so that what else the machine does falls on both.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.benchmarks.datasets import write_clicks
from penstock.benchmarks.stores.server import make_bucket, serve_s3
from penstock.loader import pack
from penstock.storage import open_store

from .arguments import OptionalInt, OptionalPath, parse_config
from .single_pass import SEQ_LEN

_BLOB_BYTES = 38_000
_UNITS = {"samples_per_s": 0, "cpu_us_per_sample": 1, "page_faults": 0, "first_batch_s": 3}
_JOB = Path(__file__).with_name("single_pass.py")


@dataclass(frozen=True, kw_only=True)
class Config:
    """First passes of raw bytes (38 kB in tar) and tokens (2,048 as int64), this checkout against another."""

    before: Path
    """The other checkout: a folder named penstock."""

    rounds: int = 9
    """Passes of each checkout and case."""

    blobs: int = 8_000
    """Samples of the raw bytes."""

    sequences: int = 65_536
    """Sequences of tokens."""

    rows: int = 2_000_000
    """Rows of a click log, 40 columns of Parquet."""

    store: Literal["local", "s3"] = "local"
    """Where the data lie: in a folder, or on the S3 server that the environment names or that is started."""

    memory_limit: OptionalInt = None
    """The loaders' memory limit in MiB: where it is below the data's size, memory is used again in the first pass."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def write_data(folder: Path, config: Config) -> None:
    """Random bytes in tar shards, and one file of uint16 tokens, each with its index."""
    rng = np.random.default_rng(0)
    blobs = ({"__key__": f"{i:06d}", "jpg": rng.bytes(_BLOB_BYTES), "cls": i % 1000} for i in range(config.blobs))
    pack(blobs, folder / "raw", format="tar", shard_bytes=20 << 20, progress=False)
    (folder / "tokens").mkdir()
    tokens = rng.integers(0, 50_000, config.sequences * SEQ_LEN, dtype=np.uint16)
    (folder / "tokens" / "tokens.bin").write_bytes(tokens.tobytes())
    (folder / "rows").mkdir()
    write_clicks(str(folder / "rows"), config.rows)


def pass_command(case: str, url: str, options: dict[str, Any]) -> list[str]:
    """The command of a process that makes one pass and prints what it took as JSON."""
    return [sys.executable, "-P", str(_JOB.resolve()), case, url, json.dumps(options)]


def pass_environment(checkout: Path, folder: Path) -> dict[str, str]:
    """The environment in which that process runs the penstock of ``checkout``, with its cache in ``folder``."""
    return {**os.environ, "PYTHONPATH": str(checkout.resolve().parent), "PENSTOCK_CACHE": str(folder / "cache")}


def measure_pass(checkout: Path, case: str, url: str, options: dict[str, Any], folder: Path) -> dict[str, float]:
    """One pass in a process of its own, over the penstock of ``checkout``, by this checkout's script."""
    command, environment = pass_command(case, url, options), pass_environment(checkout, folder)
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=folder)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


@contextmanager
def _serve_data(config: Config, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The root that the data lie below, and the loader's options for it."""
    options: dict[str, Any] = {} if config.memory_limit is None else {"memory_limit": config.memory_limit << 20}
    if config.store == "local":
        yield str(folder), options
        return
    with serve_s3() as storage_options:
        bucket = f"penstock-first-pass-{os.getpid()}"
        make_bucket(bucket, storage_options)
        source, target = open_store(folder), open_store(f"s3://{bucket}", storage_options=storage_options)
        for info in source.list():
            target.put(info.key, source.get(info.key))
        yield f"s3://{bucket}", {**options, "storage_options": storage_options}
        target.delete([info.key for info in target.list()])


def main(config: Config) -> None:
    ours = Path(__file__).resolve().parents[1]
    cases: dict[str, tuple[str, tuple[Path, ...]]] = {
        "raw": ("raw", (config.before, ours)),
        "raw view": ("raw", (ours,)),
        "tokens": ("tokens", (config.before, ours)),
        "rows": ("rows", (config.before, ours)),
    }
    passes: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_data(folder, config)
        with _serve_data(config, folder) as (root, options):
            for number in range(-1, config.rounds):  # the first is not counted: it writes the index and warms the cache
                for case, (data, checkouts) in cases.items():
                    for checkout in checkouts if number % 2 else checkouts[::-1]:
                        side = "after" if checkout == ours else "before"
                        measured = measure_pass(checkout, case, f"{root}/{data}", options, folder)
                        if number >= 0:
                            passes.setdefault(f"{case}, {side}", []).append(measured)
    touched = {name.partition(",")[0]: {p["touched"] for p in found} for name, found in passes.items()}
    assert all(len(sums) == 1 for sums in touched.values()), f"the two checkouts read different data: {touched}"
    quartiles = {name: _quartiles(found) for name, found in passes.items()}
    for name, values in quartiles.items():
        print(name)
        for unit, digits in _UNITS.items():
            print(f"  {unit:18}", " | ".join(f"{value:,.{digits}f}" for value in values[unit]))
    if config.out is not None:
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()}
        given = (
            f"--{name.replace('_', '-')} {value}"
            for name, value in asdict(config).items()
            if name not in ("before", "out") and value is not None
        )
        command = " ".join(["python -m devtools first_pass --before BEFORE/penstock", *given])
        result = {"command": command, "machine": machine, "quartiles": quartiles, "passes": passes}
        config.out.write_text(json.dumps(result, indent=1) + "\n")


def _quartiles(passes: list[dict[str, float]]) -> dict[str, list[float]]:
    """25%, median and 75% of each quantity."""
    return {unit: np.percentile([p[unit] for p in passes], (25, 50, 75)).tolist() for unit in _UNITS}


if __name__ == "__main__":
    main(parse_config(Config))
