"""The first batch of a fresh start beside that of a resume in mid-epoch.

Each start runs in a process of its own, imports done. The two kinds take turns, each first in every other pair, so that
what else the machine does falls on both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from penstock.benchmarks.datasets import write_clicks
from penstock.benchmarks.harness.subprocesses import MeasurementError
from penstock.benchmarks.stores.server import serve_s3
from penstock.loader import DistributedDataLoader, TokensFormat

from .arguments import OptionalPath, parse_config
from .first_pass import Config as DataConfig
from .first_pass import write_data

Store = Literal["local", "s3"]
Case = Literal["raw", "tokens", "rows"]
_BUCKET, _SEQ_LEN = "penstock-resume", 2048
_WANTED = 1.2
_UNITS = ("first_batch_s", "cpu_s", "fetched_mb")

# This file's functions, run as a module of the package that is on the path.
_START = """
import importlib.util, json, sys
import devtools
spec = importlib.util.spec_from_file_location("devtools.resume_here", {file!r})
module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
print(json.dumps(module.start_once(*json.load(sys.stdin))))
"""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Starts from the manifest beside the data: bytes (38 kB in tar), tokens (2,048), click-log rows (40 columns).

    Wanted: a resume in mid-epoch takes at most 1.2 times as long as a fresh start, in the median.
    """

    pairs: int = 10
    """Fresh starts, and as many resumes, of each case and store."""

    stores: tuple[Store, ...] = ("local", "s3")
    """Where the data lie: a folder, and an S3 server (PENSTOCK_TEST_S3_ENDPOINT's, or Ceph's gateway, started here)."""

    cases: tuple[Case, ...] = ("raw", "tokens", "rows")
    """What is read."""

    blobs: int = 8_000
    """Samples of the bytes."""

    sequences: int = 65_536
    """Sequences of tokens."""

    rows: int = 2_000_000
    """Rows of the click log."""

    before: OptionalPath = None
    """Another checkout, in a folder named penstock, whose starts are measured beside this one's."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def open_loader(case: str, url: str, storage_options: dict[str, str] | None) -> DistributedDataLoader[Any]:
    options: dict[str, dict[str, Any]] = {
        "raw": {"decode": None, "batch_size": 64},
        "tokens": {"format": TokensFormat(seq_len=_SEQ_LEN), "batch_size": 64},
        "rows": {"batch_size": 4096},
    }
    return DistributedDataLoader(url, seed=3, storage_options=storage_options, **options[case])


def start_once(
    case: str, url: str, storage_options: dict[str, str] | None, state: dict[str, Any] | None
) -> dict[str, float]:
    """One start in this process, fresh or from ``state``; seconds count from the loader's making to its first batch."""
    cpu, started = time.process_time(), time.perf_counter()
    with open_loader(case, url, storage_options) as loader:
        if state is not None:
            loader.load_state_dict(state)
        batch = next(iter(loader))
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        assert batch
        return {"first_batch_s": seconds, "cpu_s": cpu, "fetched_mb": loader.metrics().fetched_bytes / 1e6}


def _measure(checkout: Path, *arguments: Any) -> dict[str, float]:
    paths = (checkout.resolve().parent, Path(__file__).resolve().parents[1])  # the measured penstock, and this folder
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", _START.format(file=str(Path(__file__).resolve()))]
    done = subprocess.run(
        command, env=environment, input=json.dumps(arguments), check=False, capture_output=True, text=True
    )
    if done.returncode:
        raise MeasurementError(f"a start of {arguments[0]} from {arguments[1]} failed:\n{done.stderr[-2000:]}")
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def mid_epoch(case: str, folder: Path) -> dict[str, Any]:
    """The state in the middle of the first epoch."""
    with open_loader(case, str(folder / case), None) as loader:
        loader.skip_batches(len(loader) // 2)
        return loader.state_dict()


def summarise(fresh: list[dict[str, float]], resumed: list[dict[str, float]]) -> dict[str, Any]:
    """Quartiles of each quantity, and the ratio of the medians of the seconds."""
    timing: dict[str, Any] = {
        name: {unit: np.percentile([one[unit] for one in found], (25, 50, 75)).tolist() for unit in _UNITS}
        for name, found in (("fresh", fresh), ("resumed", resumed))
    }
    timing["ratio"] = timing["resumed"]["first_batch_s"][1] / timing["fresh"]["first_batch_s"][1]
    timing["cpu_ratio"] = timing["resumed"]["cpu_s"][1] / timing["fresh"]["cpu_s"][1]
    return timing


def main(config: Config) -> None:
    ours = Path(__file__).resolve().parents[1]
    checkouts = {"": ours} if config.before is None else {" before": config.before, " after": ours}
    starts: dict[str, dict[str, list[dict[str, float]]]] = {}
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as servers:
        folder = Path(scratch)
        write_data(folder, DataConfig(before=Path(), blobs=config.blobs, sequences=config.sequences))
        write_clicks(str(folder / "rows"), config.rows)
        places: dict[str, tuple[str, dict[str, str] | None]] = {"local": (str(folder), None)}
        if "s3" in config.stores:
            from .delayed import fill_bucket  # here: another checkout, which runs this file, may have none

            options = servers.enter_context(serve_s3(plain_http=True))
            tokens = TokensFormat(seq_len=_SEQ_LEN)
            fill_bucket(_BUCKET, folder, {case: tokens if case == "tokens" else None for case in config.cases}, options)
            places["s3"] = (f"s3://{_BUCKET}", options)
        states = {case: mid_epoch(case, folder) for case in config.cases}  # this also writes the local indexes
        for number in range(-1, config.pairs):  # the first is not counted: it warms the caches of the disk
            for store in config.stores:
                root, storage_options = places[store]
                for case in config.cases:
                    kinds = {"fresh": None, "resumed": states[case]}
                    turns = [(name, kind) for name in checkouts for kind in kinds]
                    for name, kind in turns if number % 2 else turns[::-1]:
                        arguments = case, f"{root}/{case}", storage_options, kinds[kind]
                        measured = _measure(checkouts[name], *arguments)
                        if number >= 0:
                            of_case = starts.setdefault(f"{case}, {store}{name}", {})
                            of_case.setdefault(kind, []).append(measured)
    summary = {name: summarise(found["fresh"], found["resumed"]) for name, found in starts.items()}
    print(f"first batch, seconds:  {'fresh (quartiles)':>21}  {'resumed (quartiles)':>21}   ratio   of CPU")
    for name, timing in sorted(summary.items()):
        fresh, resumed = (
            "{1:.3f} ({0:.3f}-{2:.3f})".format(*timing[kind]["first_batch_s"]) for kind in ("fresh", "resumed")
        )
        print(f"  {name:20} {fresh:>21}  {resumed:>21}  {timing['ratio']:6.2f}  {timing['cpu_ratio']:7.2f}")
    if config.out is not None:
        machine = {"cores": os.cpu_count(), "load": os.getloadavg()}
        command = " ".join(["python -m devtools resume", *sys.argv[1:]])
        result = {"command": command, "machine": machine, "wanted": _WANTED, "summary": summary, "starts": starts}
        config.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config))
