"""The same samples in each format that can hold them.

What a data set is packed into decides what a pass over it costs. Each pass runs in a process of its own, formats in
turn, so that what else the machine does falls on all.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.benchmarks.datasets import write_clicks
from penstock.loader import pack

from .arguments import OptionalPath, parse_config
from .first_pass import measure_pass

_BLOB_BYTES = 38_000
# What a process reads of each kind of data (single_pass knows the kinds), and the formats that are made for it.
Format = Literal["tar", "parquet", "mds", "jsonl", "arrow"]
FORMATS: dict[str, tuple[Format, ...]] = {
    "rows": ("arrow", "parquet", "mds", "jsonl"),
    "raw": ("tar", "mds", "arrow", "parquet"),
}
TITLES = {"rows": "rows of 40 numbers, batches of 4,096", "raw": "blobs of 38 kB, batches of 64"}


@dataclass(frozen=True, kw_only=True)
class Config:
    """First passes over the same samples in several formats, from the local disk."""

    rows: int = 200_000
    """Rows of a click log, 40 columns of numbers."""

    blobs: int = 8_000
    """Samples of 38 kB each, as tar members are."""

    rounds: int = 5
    """Passes over each, besides one that is not counted."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def write_formats(folder: Path, config: Config) -> dict[str, list[Path]]:
    """The data sets of each kind, a folder a format."""
    write_clicks(str(folder), config.rows)
    rows = folder / "source"
    rows.mkdir()
    for path in folder.glob("*.parquet"):
        path.rename(rows / path.name)
    made: dict[str, list[Path]] = {"rows": [], "raw": []}
    for kind, names in FORMATS.items():
        for name in names:
            target = folder / kind / name
            source = rows if kind == "rows" else _blobs(config.blobs)
            pack(source, target, format=name, shard_bytes=20 << 20, progress=False)
            made[kind].append(target)
    return made


def _blobs(count: int) -> Iterator[dict[str, Any]]:
    rng = np.random.default_rng(0)
    return ({"__key__": f"{i:06d}", "jpg": rng.bytes(_BLOB_BYTES), "cls": i % 1000} for i in range(count))


def measure(made: dict[str, list[Path]], rounds: int, scratch: Path) -> dict[str, dict[str, dict[str, float]]]:
    """For each kind and format the medians of passes, and ``bytes``, what the shards take."""
    checkout = Path(__file__).resolve().parents[1]
    passes: dict[tuple[str, str], list[dict[str, float]]] = {}
    for number in range(-1, rounds):
        for kind, folders in made.items():
            for folder in folders if number % 2 else folders[::-1]:
                measured = measure_pass(checkout, kind, str(folder), {}, scratch)
                if number >= 0:
                    passes.setdefault((kind, folder.name), []).append(measured)
    result: dict[str, dict[str, dict[str, float]]] = {kind: {} for kind in made}
    for (kind, name), found in sorted(passes.items(), key=lambda item: -item[1][0]["samples_per_s"]):
        medians = {unit: statistics.median(each[unit] for each in found) for unit in found[0]}
        medians["bytes"] = sum(path.stat().st_size for path in (scratch / kind / name).iterdir())
        result[kind][name] = medians
    return result


def tabulate(kind: str, formats: dict[str, dict[str, float]]) -> Table:
    """A kind's formats, a line each."""
    table = Table(title=TITLES[kind], title_justify="left")
    table.add_column("format")
    for heading in ("samples/s", "CPU us a sample", "first batch, s", "MB on disk"):
        table.add_column(heading, justify="right")
    for name, of in formats.items():
        numbers = (f"{of['samples_per_s']:,.0f}", f"{of['cpu_us_per_sample']:.2f}", f"{of['first_batch_s']:.2f}")
        table.add_row(name, *numbers, f"{of['bytes'] / 1e6:,.0f}")
    return table


def main(config: Config) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        made = write_formats(Path(scratch), config)
        result = measure(made, config.rounds, Path(scratch))
    for kind, formats in result.items():
        Console().print(tabulate(kind, formats))
    if config.out is not None:
        machine = {"cores": len(os.sched_getaffinity(0)), "processor": platform.machine(), "load": os.getloadavg()}
        command = f"python -m devtools formats --rounds {config.rounds} --rows {config.rows}"
        command += f" --blobs {config.blobs}"
        found = {"command": command, "machine": machine, "formats": result}
        config.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config))
