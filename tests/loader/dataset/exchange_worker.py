"""One rank of the tests of shared indexing: opens a data set and reports what came of it as a line of JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from penstock.loader.dataset.index import open_manifest
from penstock.loader.formats.arrow.parquet import ParquetFormat
from penstock.storage import PenstockError


def main(folder: str, mode: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank = dist.get_rank()
    built: list[str] = []
    read = ParquetFormat.index_shard

    def slow_read(self: ParquetFormat, store: Any, task: Any) -> Any:
        if mode == "killed" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        built.append(task.info.key)
        return read(self, store, task)

    ParquetFormat.index_shard = slow_read  # type: ignore[method-assign]
    start = time.monotonic()
    report: dict[str, Any] = {"rank": rank}
    try:
        if mode == "alone" and rank == 1:
            time.sleep(1.0)
            dist.barrier()
        manifest = open_manifest(folder, threads=2)
        report |= {"fingerprint": manifest.fingerprint, "samples": manifest.num_samples}
        if mode == "alone" and rank == 0:
            dist.barrier()
    except PenstockError as exc:
        report |= {"error": type(exc).__name__, "message": str(exc)}
    report |= {"built": len(built), "seconds": time.monotonic() - start}
    # Files, not stdout: two ranks' lines could run into each other.
    with open(f"{folder}.{rank}.json", "w") as file:  # noqa: PTH123
        json.dump(report, file)
    if mode in ("fine", "alone"):
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
