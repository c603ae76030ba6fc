"""Run by torchrun on three ranks: ``stopping_rank.py SOURCE FOLDER``. Rank 1's loader fails; each tells how it ended.

First rank 0 trains and rank 2 waits for a store that does not answer; then all go on with new loaders; at last the
others are blocked in a collective that rank 1 never enters.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from penstock import DistributedDataLoader
from penstock.storage import MemoryStore

FAILING, WAITING = 1, 2
LONG_S = 600.0


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    wait_until_counted("watching", dist.get_world_size())
    raise ValueError("no such class")


def wait_until_counted(key: str, count: int) -> None:
    """Wait until ranks have counted up a key of the loader's in the process group's store."""
    store = dist.distributed_c10d._get_default_store()
    until = time.monotonic() + 60
    while int(store.add(f"penstock/stop/{key}", 0)) < count and time.monotonic() < until:
        time.sleep(0.02)


def open_loader(url: str, *, fails: bool) -> DistributedDataLoader[Any]:
    fails = fails and dist.get_rank() == FAILING
    return DistributedDataLoader(url, batch_size=1, transform=fail if fails else None)


def read(loader: DistributedDataLoader[Any], *, meets: bool = False, pause_s: float = 0.0) -> dict[str, Any]:
    """Read until the epoch or the loader ends; tells of batches, the error, and the seconds until it came."""
    told: dict[str, Any] = {"batches": 0}
    began = time.monotonic()
    try:
        for _ in loader:
            told["batches"] += 1
            if meets:
                dist.all_reduce(torch.zeros(1))
            time.sleep(pause_s)
    except Exception as exc:  # noqa: BLE001 - how it ends is what the test asks
        told |= {"error": type(exc).__name__, "message": str(exc), "seconds": time.monotonic() - began}
    return told


def main() -> None:
    source, folder = sys.argv[1:]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    store = MemoryStore("mem://stopping/data").create()
    for path in Path(source).iterdir():
        store.put(path.name, path.read_bytes())
    told: dict[str, Any] = {}

    loader = open_loader(store.url, fails=True)
    dist.barrier()
    if rank == WAITING:
        store.slow_down(latency_s=LONG_S)
    told["apart"] = read(loader, pause_s=0.3)
    loader.close()
    told["threads"] = [thread.name for thread in threading.enumerate() if thread.name == "penstock-peers"]
    store.slow_down(latency_s=0.0)
    dist.barrier()

    with open_loader(store.url, fails=False) as loader:
        told["again"] = read(loader)
    dist.barrier()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))

    with open_loader(store.url, fails=True) as loader:
        dist.barrier()
        told["blocked"] = read(loader, meets=True)
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))
        wait_until_counted("2/known", dist.get_world_size() - 1)
    sys.exit(1)


if __name__ == "__main__":
    main()
