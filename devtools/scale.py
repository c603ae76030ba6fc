"""Measure a large data set's costs before the first batch: listing, indexing, reopening, planning; time and memory.

python -m devtools scale s3://bucket/prefix/ --option endpoint=http://... --results benchmarks/results
python -m devtools scale --made 40 50000     two million samples in 40 tar shards, made in a temporary folder
"""

from __future__ import annotations

import io
import json
import os
import shlex
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader import DistributedDataLoader, open_manifest
from penstock.loader.dataset.source import select
from penstock.storage.observability.process_usage import peak_resident_bytes

from .arguments import make_parser


def make_tars(folder: Path, shards: int, samples: int) -> None:
    """Tar shards of samples of one small file each. All are one file under many names."""
    first = folder / "shard-000000.tar"
    with tarfile.open(first, "w", format=tarfile.USTAR_FORMAT) as tar:
        for row in range(samples):
            info = tarfile.TarInfo(f"{row:08d}.txt")
            info.size = 100
            tar.addfile(info, io.BytesIO(b"x" * 100))
    for number in range(1, shards):
        os.link(first, folder / f"shard-{number:06d}.tar")


@contextmanager
def measured(row: dict[str, Any], name: str) -> Iterator[None]:
    """Note seconds, CPU seconds and the peak of this process's memory so far."""
    started, cpu = time.monotonic(), time.process_time()
    yield
    peak = peak_resident_bytes() >> 20
    row[name] = {
        "seconds": round(time.monotonic() - started, 2),
        "cpu_seconds": round(time.process_time() - cpu, 2),
        "peak_mib": peak,
    }
    print(f"{name}: {row[name]}", flush=True)


def measure(url: str, options: dict[str, str]) -> dict[str, Any]:
    """The row of one data set, whose index is not in any cache."""
    row: dict[str, Any] = {"load_1m": os.getloadavg()[0]}
    with tempfile.TemporaryDirectory() as cache:
        given: dict[str, Any] = {"storage_options": options or None, "cache_dir": cache}
        with measured(row, "list"):
            store, selection = select(url, options or None)
        store.close()
        with measured(row, "index"):
            manifest = open_manifest(url, progress=False, **given)
        with measured(row, "open again"):
            open_manifest(url, progress=False, **given)
        with (
            measured(row, "first batch"),
            DistributedDataLoader(
                manifest, batch_size=256, rank=0, world_size=16, storage_options=options or None
            ) as loader,
        ):
            next(iter(loader))
    counts = {"objects": len(selection.listing), "shards": len(manifest.shards), "samples": manifest.num_samples}
    return {**counts, "chunks": manifest.num_chunks, "manifest_bytes": len(manifest.to_bytes()), **row}


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("url", nargs="?", help="a data set")
    parser.add_argument("--option", nargs="+", default=[], metavar="NAME=VALUE", help="its storage options")
    parser.add_argument("--made", nargs=2, type=int, metavar=("SHARDS", "SAMPLES"), help="make a data set instead")
    parser.add_argument("--results", help="a folder for scale.json, which the run is added to")
    given = parser.parse_args(arguments)
    if (given.url is None) == (given.made is None):
        parser.error("give a URL, or --made")
    with tempfile.TemporaryDirectory() as folder:
        if given.made:
            make_tars(Path(folder), *given.made)
        row = measure(given.url or folder, dict(pair.partition("=")[::2] for pair in given.option))
    if given.results:
        hidden = [word.partition("=")[0] + "=..." if "secret" in word else word for word in arguments]
        path = Path(given.results, "scale.json")
        known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"runs": []}
        about = {
            "command": shlex.join(["python", "-m", "devtools.scale", *hidden]),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": describe_machine(),
            "versions": list_versions(),
        }
        known["runs"].append({**about, **row})
        path.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
