"""Time from ``import penstock`` to a process's first batch: imports, construction, first batch, and what took long.

The data sets have indexes. Each measurement runs in a process of its own, which has torch imported; ``import
pyarrow.parquet`` is timed in it too, as a measure of the machine. With ``--before`` two checkouts take turns.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from rich.console import Console
from rich.table import Table

from penstock.benchmarks.harness.subprocesses import MeasurementError
from penstock.benchmarks.machine import describe_machine
from penstock.benchmarks.stores.delay_line import delay_line
from penstock.benchmarks.stores.server import serve_s3
from penstock.loader import TokensFormat

from .arguments import OptionalPath, parse_config
from .delayed import fill_bucket
from .first_pass import Config as Data
from .first_pass import pass_environment, write_data
from .single_start import SEQ_LEN

if TYPE_CHECKING:
    from penstock.loader.formats.shard import ShardFormat

Case = Literal["raw", "tokens", "rows"]

_BUCKET = "penstock-start"
_JOB = Path(__file__).with_name("single_start.py").resolve()
_UNITS = {
    "pyarrow_s": "import pyarrow.parquet, s",
    "import_s": "import of the loader, s",
    "modules": "modules of penstock",
    "foreign_modules": "other modules",
    "construction_s": "construction, s",
    "first_batch_s": "first batch, s",
    "after_imports_s": "construction to first batch, s",
    "total_s": "import to first batch, s",
    "after_imports_cpu_s": "construction to first batch, CPU s",
    "cpu_s": "import to first batch, CPU s",
}
_COUNTS = ("modules", "foreign_modules")


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time from the import of the loader to its first batch, this checkout against another."""

    before: OptionalPath = None
    """The other checkout: a folder named penstock."""

    rounds: int = 7
    """Processes of each checkout and case, in turns."""

    cases: tuple[Case, ...] = ("raw", "tokens", "rows")
    """Which are started: 38 kB in tar, 2,048 tokens, or rows of 40 columns of Parquet."""

    scale: float = 0.25
    """Size of the data; 1 is about 300 MB each."""

    store: Literal["local", "s3"] = "local"
    """Where the data lie: in a folder, or on the S3 server that the environment names or that is started."""

    delay_ms: float = 0.0
    """Delay of each request to S3, and of each new connection: a round trip to a store far away."""

    least_ms: float = 2.0
    """What takes less is not shown in the timeline of the process whose time was the median."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def measure_start(checkout: Path, case: str, url: str, options: dict[str, Any], scratch: Path) -> dict[str, Any]:
    """The measurement in a process of its own, over the penstock of ``checkout``, by this checkout's script."""
    command = [sys.executable, "-P", str(_JOB), case, url, json.dumps(options)]
    environment = {**pass_environment(checkout, scratch), "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True, cwd=scratch)
    if done.returncode:
        raise MeasurementError(f"a start of {case} from {url} failed:\n{done.stderr[-2000:]}")
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


@contextmanager
def _serve_data(config: Config, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """The root that the data lie below, and the loader's options for it."""
    whole = Data(before=Path(), cases=config.cases)
    blobs, sequences, rows = (int(count * config.scale) for count in (whole.blobs, whole.sequences, whole.rows))
    write_data(folder, replace(whole, blobs=blobs, sequences=sequences, rows=rows))
    if config.store == "local":
        yield str(folder), {}
        return
    with ExitStack() as servers:
        options = servers.enter_context(serve_s3(plain_http=True))
        tokens = TokensFormat(seq_len=SEQ_LEN)
        formats: dict[str, ShardFormat | None] = {case: tokens if case == "tokens" else None for case in config.cases}
        bucket = f"{_BUCKET}-{os.getpid()}"
        fill_bucket(bucket, folder, formats, options)
        if config.delay_ms:
            late = servers.enter_context(delay_line(options["endpoint"], config.delay_ms / 1000))
            options = {**options, "endpoint": late}
        yield f"s3://{bucket}", {"storage_options": options}


def _show(found: dict[tuple[str, str], list[dict[str, Any]]], config: Config) -> dict[str, dict[str, float]]:
    medians = {
        f"{case}, {side}": {unit: float(np.median([one[unit] for one in runs])) for unit in _UNITS}
        for (case, side), runs in found.items()
    }
    where = f"{config.store}, {config.delay_ms:g} ms away" if config.delay_ms else config.store
    table = Table(title=f"{config.rounds} processes in turn, medians, {where}", title_justify="left")
    table.add_column("")
    for name in medians:
        table.add_column(name, justify="right")
    for unit, title in _UNITS.items():
        digits = 0 if unit in _COUNTS else 3
        table.add_row(title, *(f"{values[unit]:.{digits}f}" for values in medians.values()))
    console = Console()
    console.print(table)
    for (case, side), runs in found.items():
        if side == "after":
            middle = sorted(runs, key=lambda one: one["after_imports_s"])[len(runs) // 2]
            console.print(_draw(case, middle, config.least_ms))
    return medians


def _draw(case: str, run: dict[str, Any], least_ms: float) -> Table:
    """The timeline of a start, from the end of the import on."""
    table = Table(title=f"{case}: {1000 * run['after_imports_s']:.0f} ms after the import", title_justify="left")
    for title in ("at ms", "for ms"):
        table.add_column(title, justify="right")
    table.add_column("thread")
    table.add_column("what")
    for name, owner, start, stop in run["events"]:
        if 1000 * (stop - start) >= least_ms:
            table.add_row(f"{1000 * start:.0f}", f"{1000 * (stop - start):.0f}", owner.removeprefix("penstock-"), name)
    return table


def main(config: Config) -> None:
    ours = Path(__file__).resolve().parents[1]
    checkouts = {"after": ours} if config.before is None else {"before": config.before, "after": ours}
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        with _serve_data(config, scratch) as (root, options):
            for number in range(-1, config.rounds):  # the first compiles, and keeps the index
                for case in config.cases:
                    for side in checkouts if number % 2 else reversed(checkouts):
                        measured = measure_start(checkouts[side], case, f"{root}/{case}", options, scratch)
                        if number >= 0:
                            found.setdefault((case, side), []).append(measured)
    medians = _show(found, config)
    if config.out is not None:
        runs = {f"{case}, {side}": starts for (case, side), starts in found.items()}
        result = {
            "command": " ".join(["python -m devtools start", *sys.argv[1:]]),
            "machine": describe_machine(),
            "medians": medians,
            "runs": runs,
        }
        config.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config))
