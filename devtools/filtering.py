"""Measure what dropping half of the samples costs.

Each pass is one epoch from local disk. Passes that drop and passes that deliver all alternate, and so does which is
first, so that other work of the machine slows both.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from penstock.benchmarks.datasets import write_thumbnails
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader import DistributedDataLoader, ImageDecoder, Keep

from .arguments import OptionalPath, parse_config

_BATCH, _ROWS_BATCH = 64, 4096
Sample = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Config:
    """Epochs that drop half of their samples, against epochs that read and decode all."""

    rounds: int = 7
    """Passes of each case."""

    images: int = 12_000
    """JPEGs of about 10 KB, in tar shards, decoded."""

    rows: int = 1_000_000
    """Rows of eight float columns, in Parquet."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def take_all(sample: Sample) -> Sample:
    return sample


def drop_half(sample: Sample) -> Sample | None:
    return sample if int(sample["cls"]) % 2 else None


# Case: the data that it reads, the samples that it delivers as a share of all, and the loader's arguments.
_IMAGES = {"decode": {"jpg": ImageDecoder(size=160, crop="center")}, "batch_size": _BATCH, "last_batch": "partial"}
_ROWS = {"batch_size": _ROWS_BATCH, "last_batch": "partial"}
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "images, all": ("images", 1.0, {**_IMAGES, "transform": take_all}),
    "images, transform drops half": ("images", 0.5, {**_IMAGES, "transform": drop_half, "may_drop": True}),
    "images, keep drops half": (
        "images",
        0.5,
        {**_IMAGES, "transform": take_all, "keep": lambda sample: int(sample["cls"]) % 2},
    ),
    "rows, all": ("rows", 1.0, _ROWS),
    "rows, keep drops half": ("rows", 0.5, {**_ROWS, "keep": Keep(["c0"], lambda columns: columns["c0"] < 0.5)}),
}


def write_rows(folder: Path, rows: int) -> None:
    """Parquet shards of eight columns of uniform float32."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for number in range(8):
        table = pa.table({f"c{i}": rng.random(rows // 8, dtype=np.float32) for i in range(8)})
        pq.write_table(table, folder / f"{number}.parquet", row_group_size=1 << 14)


def read_once(folder: Path, options: dict[str, Any]) -> dict[str, float]:
    """One epoch; seconds of the wall and of the process, and the samples delivered."""
    samples, cpu, started = 0, time.process_time(), time.perf_counter()
    with DistributedDataLoader(folder, seed=3, **options) as loader:
        for batch in loader:
            samples += len(next(iter(batch.values())))
    return {"seconds": time.perf_counter() - started, "cpu_s": time.process_time() - cpu, "samples": samples}


def main(config: Config) -> None:
    passes: dict[str, list[dict[str, float]]] = {name: [] for name in CASES}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_thumbnails(str(folder / "images"), config.images)
        write_rows(folder / "rows", config.rows)
        for number in range(-1, config.rounds):  # the first is not counted: it writes the index and warms the cache
            for name, (data, _, options) in list(CASES.items())[:: 1 if number % 2 else -1]:
                measured = read_once(folder / data, options)
                if number >= 0:
                    passes[name].append(measured)
    ratios = {name: _ratio(passes, name) for name in CASES if not name.endswith("all")}
    for name, ratio in ratios.items():
        print(f"{name:30} {ratio['seconds']:.2f} of the time and {ratio['cpu_s']:.2f} of the CPU time of all")
    if config.out is not None:
        command = f"python -m devtools filtering --rounds {config.rounds}"
        about = {"command": command, "machine": describe_machine(), "versions": list_versions()}
        config.out.write_text(json.dumps({**about, "ratios": ratios, "passes": passes}, indent=1) + "\n")


def _ratio(passes: dict[str, list[dict[str, float]]], name: str) -> dict[str, float]:
    """Medians over the rounds of a pass's figures, as multiples of those of reading all in the same round."""
    pairs = list(zip(passes[name], passes[f"{CASES[name][0]}, all"], strict=True))
    of: Callable[[str], float] = lambda unit: statistics.median(one[unit] / whole[unit] for one, whole in pairs)  # noqa: E731
    return {unit: of(unit) for unit in ("seconds", "cpu_s")}


if __name__ == "__main__":
    main(parse_config(Config))
