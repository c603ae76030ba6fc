"""Time from ``import penstock`` to a process's first batch: imports, construction, first batch.

The data set is local and indexed, of 2,048-token rows. Each measurement runs in a process of its own, which has torch
imported; ``import pyarrow.parquet`` is timed in it too, as a measure of the machine. With ``--before`` two checkouts
take turns.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from .arguments import OptionalPath, parse_config
from .first_pass import pass_environment

_SEQ_LEN, _SEQUENCES = 2048, 4096
_JOB = Path(__file__).with_name("single_start.py").resolve()
_UNITS = {
    "pyarrow_s": "import pyarrow.parquet, s",
    "import_s": "import of the loader, s",
    "modules": "modules of penstock",
    "construction_s": "construction, s",
    "first_batch_s": "first batch, s",
    "total_s": "import to first batch, s",
}


@dataclass(frozen=True, kw_only=True)
class Config:
    """Time from the import of the loader to its first batch, this checkout against another."""

    before: OptionalPath = None
    """The other checkout: a folder named penstock."""

    rounds: int = 7
    """Processes of each checkout, in turns."""

    out: OptionalPath = None
    """Write the results here as JSON, too."""


def measure_start(checkout: Path, data: Path, scratch: Path) -> dict[str, float]:
    """The measurement in a process of its own, over the penstock of ``checkout``, by this checkout's script."""
    command = [sys.executable, "-P", str(_JOB), str(data), str(_SEQ_LEN)]
    environment = {**pass_environment(checkout, scratch), "PYTHONPYCACHEPREFIX": str(scratch / "bytecode")}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package is compiled once
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True, cwd=scratch)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(config: Config) -> None:
    ours = Path(__file__).resolve().parents[1]
    checkouts = {"after": ours} if config.before is None else {"before": config.before, "after": ours}
    found: dict[str, list[dict[str, float]]] = {side: [] for side in checkouts}
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        data = scratch / "tokens"
        data.mkdir()
        np.random.default_rng(0).integers(0, 50_000, _SEQ_LEN * _SEQUENCES, np.uint16).tofile(data / "tokens.bin")
        for number in range(-1, config.rounds):  # the first compiles, and keeps the index
            for side in checkouts if number % 2 else reversed(checkouts):
                measured = measure_start(checkouts[side], data, scratch)
                if number >= 0:
                    found[side].append(measured)
    medians = {
        side: {unit: float(np.median([one[unit] for one in runs])) for unit in _UNITS} for side, runs in found.items()
    }
    table = Table(title=f"{config.rounds} processes in turn, medians", title_justify="left")
    table.add_column("")
    for side in checkouts:
        table.add_column(side, justify="right")
    for unit, title in _UNITS.items():
        table.add_row(title, *(f"{medians[side][unit]:.{0 if unit == 'modules' else 3}f}" for side in checkouts))
    Console().print(table)
    if config.out is not None:
        config.out.write_text(json.dumps({"medians": medians, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main(parse_config(Config))
