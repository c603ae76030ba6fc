"""First passes over data, local or in S3, two checkouts in turn.

Each pass runs in a process of its own, so that nothing is warm but the file system's cache, and the two checkouts take
turns, each first in every other round, so that what else the machine does falls on both.
"""

from __future__ import annotations

import json
import os
import platform
import shlex
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
_UNITS = {
    "samples_per_s": 0,
    "cpu_us_per_sample": 1,
    "page_faults": 0,
    "first_batch_s": 3,
    "later_samples_per_s": 0,
    "later_cpu_us_per_sample": 1,
}
_RATES = ("samples_per_s", "cpu_us_per_sample", "later_samples_per_s", "later_cpu_us_per_sample")
_JOB = Path(__file__).with_name("single_pass.py")


Case = Literal["raw", "raw view", "tokens", "rows"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """First passes of raw bytes in tar, tokens (2,048 as int64) and rows, this checkout against another."""

    before: Path
    """The other checkout: a folder named penstock."""

    rounds: int = 9
    """Passes of each checkout and case."""

    cases: tuple[Case, ...] = ("raw", "raw view", "tokens", "rows")
    """Which are measured."""

    blobs: int = 8_000
    """Raw samples of 38 kB; of another size as many as take the same bytes."""

    sizes: tuple[int, ...] = (_BLOB_BYTES,)
    """Bytes of a raw sample, one data set each."""

    later: int = 0
    """Passes of each process after its first one, which are told apart."""

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
    for size in config.sizes:
        count = max(1, config.blobs * _BLOB_BYTES // size)
        blobs = ({"__key__": f"{i:06d}", "jpg": rng.bytes(size), "cls": i % 1000} for i in range(count))
        pack(blobs, folder / raw_folder(size), format="tar", shard_bytes=20 << 20, progress=False)
    if "tokens" in config.cases:
        (folder / "tokens").mkdir()
        tokens = rng.integers(0, 50_000, config.sequences * SEQ_LEN, dtype=np.uint16)
        (folder / "tokens" / "tokens.bin").write_bytes(tokens.tobytes())
    if "rows" in config.cases:
        (folder / "rows").mkdir()
        write_clicks(str(folder / "rows"), config.rows)


def raw_folder(size: int = _BLOB_BYTES) -> str:
    """The folder of the raw samples of a size."""
    return "raw" if size == _BLOB_BYTES else f"raw-{size}"


def pass_command(case: str, url: str, options: dict[str, Any], later: int = 0) -> list[str]:
    """The command of a process that makes one pass, and ``later`` ones, and prints what they took as JSON."""
    more = ["--later", str(later)] if later else []
    return [sys.executable, "-P", str(_JOB.resolve()), case, url, json.dumps(options), *more]


def pass_environment(checkout: Path, folder: Path) -> dict[str, str]:
    """The environment in which that process runs the penstock of ``checkout``, with its cache in ``folder``."""
    return {**os.environ, "PYTHONPATH": str(checkout.resolve().parent), "PENSTOCK_CACHE": str(folder / "cache")}


def measure_pass(
    checkout: Path, case: str, url: str, options: dict[str, Any], folder: Path, later: int = 0
) -> dict[str, float]:
    """One pass, and ``later`` ones, in a process of its own over ``checkout``'s penstock, by this checkout's script."""
    command, environment = pass_command(case, url, options, later), pass_environment(checkout, folder)
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


def _list_cases(config: Config, ours: Path) -> dict[str, tuple[str, str, tuple[Path, ...]]]:
    """The case, the folder of its data and the checkouts that it is measured of, by name."""
    found: dict[str, tuple[str, str, tuple[Path, ...]]] = {}
    for case in config.cases:
        if case in ("tokens", "rows"):
            found[case] = case, case, (config.before, ours)
            continue
        for size in config.sizes:
            name = case if config.sizes == (_BLOB_BYTES,) else f"{case} {size:,}"
            found[name] = case, raw_folder(size), (config.before, ours)
    return found


def main(config: Config) -> None:
    ours = Path(__file__).resolve().parents[1]
    cases = _list_cases(config, ours)
    passes: dict[str, list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_data(folder, config)
        with _serve_data(config, folder) as (root, options):
            for number in range(-1, config.rounds):  # the first is not counted: it writes the index and warms the cache
                for name, (case, data, checkouts) in cases.items():
                    for checkout in checkouts if number % 2 else checkouts[::-1]:
                        side = "after" if checkout == ours else "before"
                        measured = measure_pass(checkout, case, f"{root}/{data}", options, folder, config.later)
                        if number >= 0:
                            passes.setdefault(f"{name}, {side}", []).append(measured)
    touched: dict[str, set[float]] = {}
    for name, found in passes.items():
        touched.setdefault(name.partition(",")[0], set()).update(p["touched"] for p in found)
    assert all(len(sums) == 1 for sums in touched.values()), f"the two checkouts read different data: {touched}"
    quartiles = {name: _quartiles(found) for name, found in passes.items()}
    for name, values in quartiles.items():
        print(name)
        for unit, found_values in values.items():
            print(f"  {unit:24}", " | ".join(f"{value:,.{_UNITS[unit]}f}" for value in found_values))
    ratios = {name: _ratios(passes[f"{name}, before"], passes[f"{name}, after"]) for name in cases}
    for name, of_units in ratios.items():
        print(f"{name}, after to before:", ", ".join(f"{unit} {ratio:.2f}" for unit, ratio in of_units.items()))
    if config.out is not None:
        machine = {"cores": os.cpu_count(), "processor": platform.machine(), "load": os.getloadavg()}
        given = (
            f"--{name.replace('_', '-')} {' '.join(map(_word, value)) if isinstance(value, tuple) else value}"
            for name, value in asdict(config).items()
            if name not in ("before", "out") and value is not None
        )
        command = " ".join(["python -m devtools first_pass --before BEFORE/penstock", *given])
        result = {"command": command, "machine": machine, "quartiles": quartiles, "ratios": ratios, "passes": passes}
        config.out.write_text(json.dumps(result, indent=1) + "\n")


def _word(value: object) -> str:
    """A value as a word of the shell."""
    return shlex.quote(str(value))


def _ratios(before: list[dict[str, float]], after: list[dict[str, float]]) -> dict[str, float]:
    """The median over the rounds of each rate, to that of the other checkout in the same round."""
    units = [unit for unit in _RATES if unit in after[0]]
    pairs = list(zip(before, after, strict=True))
    return {unit: float(np.median([new[unit] / old[unit] for old, new in pairs])) for unit in units}


def _quartiles(passes: list[dict[str, float]]) -> dict[str, list[float]]:
    """25%, median and 75% of each quantity."""
    units = [unit for unit in _UNITS if unit in passes[0]]
    return {unit: np.percentile([p[unit] for p in passes], (25, 50, 75)).tolist() for unit in units}


if __name__ == "__main__":
    main(parse_config(Config))
