"""One rank of the tests of shared indexing: opens data sets, one mode after another, and reports on each as JSON."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock.loader.dataset.index import open_manifest
from penstock.loader.formats.arrow.parquet import ParquetFormat
from penstock.loader.formats.shard import ShardIndex, ShardTask
from penstock.storage import PenstockError, Store
from penstock.storage.files import write_whole


def main(folder: str, *modes: str) -> None:
    join()
    for mode in modes:
        run(f"{folder}/{mode}", mode)
        if len(modes) > 1:
            dist.barrier()
    if len(modes) > 1:
        dist.destroy_process_group()


def join() -> None:
    """Under torchrun as it says; else rank 0 hosts the store, at a port of the kernel's choice, and writes it down."""
    patience = timedelta(seconds=60)
    if "PORT_FILE" not in os.environ:
        dist.init_process_group("gloo", timeout=patience)
        return
    rank, size, file = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Path(os.environ["PORT_FILE"])
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=patience)
        write_whole(file, str(store.port).encode())
    else:
        while not file.exists():
            time.sleep(0.05)
        store = dist.TCPStore("127.0.0.1", int(file.read_text()), wait_for_workers=False, timeout=patience)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=patience)


def run(folder: str, mode: str) -> None:
    rank = dist.get_rank()
    built: list[str] = []
    read = ParquetFormat.index_shard

    store = dist.distributed_c10d._get_default_store()

    def slow_read(self: ParquetFormat, shards: Store, task: ShardTask) -> ShardIndex:
        if mode.startswith("killed"):
            store.set("building", "")
            time.sleep(1.0)  # the other rank waits by then
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.05)
        built.append(task.info.key)
        return read(self, shards, task)

    ParquetFormat.index_shard = slow_read  # type: ignore[method-assign]
    sources = [folder]
    if mode == "crossed":
        # Each rank builds one of the two and then needs the other's: whoever waited first would wait for ever.
        sources = [f"{folder}/{name}" for name in (("part-000.parquet", "") if rank else ("", "part-000.parquet"))]
    start = time.monotonic()
    report: dict[str, Any] = {"rank": rank}
    try:
        if mode == "alone" and rank == 1:
            dist.barrier()
        if mode.startswith("killed") and mode != f"killed {rank}":
            store.wait(["building"])
        manifests = [open_manifest(source, threads=2, cache_dir=f"{folder}.cache-{rank}") for source in sources]
        report["samples"] = sorted(manifest.num_samples for manifest in manifests)
        report["fingerprints"] = sorted(manifest.fingerprint for manifest in manifests)
        if mode == "alone" and rank == 0:
            dist.barrier()
    except PenstockError as exc:
        report |= {"error": type(exc).__name__, "message": str(exc)}
    report |= {"built": len(built), "seconds": time.monotonic() - start}
    # Files, not stdout: two ranks' lines could run into each other.
    Path(f"{folder}.{rank}.json").write_text(json.dumps(report))
    ParquetFormat.index_shard = read  # type: ignore[method-assign]


if __name__ == "__main__":
    main(*sys.argv[1:])
