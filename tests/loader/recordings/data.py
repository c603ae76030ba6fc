"""Small data sets whose bytes, and so fingerprints, do not depend on versions of any library."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import numpy as np

from penstock import DistributedDataLoader, open_manifest
from penstock.loader import CostExpression, index_costs, write_costs

SHARDS = 2
ROWS = 20  # of a shard


def make_data(folder: Path) -> Path:
    """Write "rows" and "more", of the same fields, "tar", "tokens" and "splits"; "bad" is a quarantine of "rows"."""
    rng = np.random.default_rng(0)
    for name in ("rows", "more", "splits/train", "splits/test"):
        write_rows(folder / name, rng)
    (folder / "tokens").mkdir()
    rng.integers(0, 1000, 400, np.uint16).tofile(folder / "tokens" / "0.bin")
    (folder / "tar").mkdir()
    with tarfile.open(folder / "tar" / "0.tar", "w", format=tarfile.USTAR_FORMAT) as archive:
        for row in range(SHARDS * ROWS):
            value = str(row).encode()
            member = tarfile.TarInfo(f"{row:03d}.cls")
            member.size = len(value)
            archive.addfile(member, io.BytesIO(value))
    expression = CostExpression.parse("tokens=length")
    for name in ("rows", "more", "tar"):
        manifest = open_manifest(str(folder / name), progress=False)
        if name != "tar":
            write_costs(manifest, expression, index_costs(manifest, expression, progress=False))
    options: dict[str, Any] = {"on_error": "skip", "max_errors": 9, "quarantine": folder / "bad"}
    with DistributedDataLoader(
        str(folder / "rows"), batch_size=4, transform=fail_at_seven, rank=0, world_size=1, **options
    ) as loader:
        for _ in loader:
            pass
    return folder


def write_rows(folder: Path, rng: np.random.Generator) -> None:
    folder.mkdir(parents=True)
    for shard in range(SHARDS):
        lines = [_row(shard * ROWS + row, int(rng.integers(1, 40))) for row in range(ROWS)]
        (folder / f"{shard}.jsonl").write_text("".join(lines))


def _row(number: int, length: int) -> str:
    return json.dumps({"n": number, "length": length, "text": "x" * length}) + "\n"


def fail_at_seven(sample: dict[str, Any]) -> dict[str, Any]:
    if sample["n"] == 7:
        raise ValueError("seven")
    return sample
