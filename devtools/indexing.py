"""Measure how long a prefix of many small shards takes to index: by one process, and by ranks that open it together.

python -m devtools indexing --shards 100000 --latency-ms 30 --ranks 1 4 --results benchmarks/results
"""

from __future__ import annotations

import io
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch.distributed as dist

from penstock.benchmarks.child_arguments import take_mode
from penstock.benchmarks.machine import describe_machine, list_versions
from penstock.loader.dataset.index import open_manifest
from penstock.storage import LocalStore

from .arguments import make_parser


def write_shards(folder: Path, shards: int, rows: int = 4) -> None:
    """Parquet shards of two columns and one row group each, all of one content."""
    buffer = io.BytesIO()
    pq.write_table(pa.table({"id": range(rows), "text": ["some text"] * rows}), buffer)
    for number in range(shards):
        (folder / f"part-{number:06d}.parquet").write_bytes(buffer.getvalue())


def slow_down_reads(latency_s: float) -> None:
    """Let every GET of this process take ``latency_s`` longer: an object store is far away, its threads wait."""
    read = LocalStore.get

    def slow_read(self: LocalStore, *args: Any, **kwargs: Any) -> memoryview:
        time.sleep(latency_s)
        return read(self, *args, **kwargs)

    LocalStore.get = slow_read  # type: ignore[method-assign]


def run_rank(folder: str, latency_s: float, threads: int, result: str) -> None:
    """Index the folder as one rank of a process group; rank 0 writes the seconds until every rank had the manifest."""
    dist.init_process_group("gloo")
    slow_down_reads(latency_s)
    dist.barrier()
    started = time.monotonic()
    cache = tempfile.mkdtemp(dir=Path(result).parent)
    manifest = open_manifest(folder, cache_dir=cache, progress=False, threads=threads)
    dist.barrier()
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps([time.monotonic() - started, len(manifest.shards)]))
    dist.destroy_process_group()


def measure(folder: Path, latency_s: float, threads: int, ranks: int) -> float:
    """Seconds that ``ranks`` processes of this machine take."""
    with tempfile.TemporaryDirectory() as scratch:
        result = Path(scratch, "result.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [
            "-m",
            "devtools.indexing",
            "--rank-of",
            str(folder),
            str(latency_s),
            str(threads),
            str(result),
        ]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        seconds, shards = json.loads(result.read_text())
    assert shards == sum(1 for _ in folder.iterdir())
    return float(seconds)


def main(arguments: list[str]) -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--shards", type=int, default=100_000)
    parser.add_argument("--latency-ms", type=float, nargs="+", default=[0.0, 30.0])
    parser.add_argument("--threads", type=int, nargs="+", default=[32], help="of each rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", default="/dev/shm", help="where the shards are written for the while")
    parser.add_argument("--results", help="a folder for indexing.json")
    options = parser.parse_args(arguments)
    cases = [(ms, threads, n) for ms in options.latency_ms for threads in options.threads for n in options.ranks]
    seconds: dict[tuple[float, int, int], list[float]] = {case: [] for case in cases}
    machine = describe_machine()
    with tempfile.TemporaryDirectory(dir=options.folder) as data:
        write_shards(Path(data), options.shards)
        for _ in range(options.rounds):
            for case in cases:
                seconds[case].append(measure(Path(data), case[0] / 1e3, *case[1:]))
                print(dict(zip(("latency_ms", "threads", "ranks"), case, strict=True)), seconds[case], flush=True)
    rows = [
        {"shards": options.shards, "latency_ms": ms, "threads": threads, "ranks": ranks, "seconds": times}
        for (ms, threads, ranks), times in seconds.items()
    ]
    if options.results:
        command = shlex.join(["python", "-m", "devtools.indexing", *arguments])
        about = {"command": command, "date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine}
        text = json.dumps({**about, "versions": list_versions(), "rows": rows}, indent=1)
        Path(options.results, "indexing.json").write_text(text + "\n")


if __name__ == "__main__":
    rank = take_mode("--rank-of", (str, float, int, str), "python -m devtools indexing", variable="RANK")
    if rank is not None:
        run_rank(*rank)
    else:
        main(sys.argv[1:])
