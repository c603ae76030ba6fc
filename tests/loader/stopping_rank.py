"""Run by torchrun on three ranks: ``stopping_rank.py SOURCE FOLDER``. Rank 1's loader fails; each tells how it ended.

First rank 0 trains and rank 2 waits for a store that does not answer. Then rank 1 cannot make its loader, and then it
sets another batch size than the others. All go on with new loaders. At last the others are blocked in a collective that
rank 1 never enters.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable
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


def start(url: str, folder: Path) -> dict[str, Any]:
    """Make a loader that rank 1 cannot make, and read from it."""
    began = time.monotonic()
    audit_dir = folder / f"audit-{dist.get_rank()}"
    if dist.get_rank() == FAILING:
        audit_dir.write_bytes(b"")
    try:
        with DistributedDataLoader(url, batch_size=1, audit_dir=audit_dir) as loader:
            return read(loader, pause_s=0.3)
    except Exception as exc:  # noqa: BLE001 - as below
        return {"error": type(exc).__name__, "message": str(exc), "seconds": time.monotonic() - began}


def read(
    loader: DistributedDataLoader[Any],
    *,
    meets: bool = False,
    pause_s: float = 0.0,
    call: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Read until the epoch or the loader ends; tells of batches, the error, and the seconds until it came.

    ``call`` comes after the first batch.
    """
    told: dict[str, Any] = {"batches": 0}
    began = time.monotonic()
    try:
        for _ in loader:
            told["batches"] += 1
            if told["batches"] == 1:
                call()
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

    told["start"] = start(store.url, Path(folder))
    dist.barrier()
    with open_loader(store.url, fails=False) as loader:
        told["called"] = read(loader, pause_s=0.3, call=lambda: loader.set_batch_size(4 if rank == FAILING else 2))
    dist.barrier()

    with open_loader(store.url, fails=False) as loader:
        told["again"] = read(loader)
    dist.barrier()
    Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))

    with open_loader(store.url, fails=True) as loader:
        dist.barrier()
        told["blocked"] = read(loader, meets=True)
        Path(folder, f"rank-{rank}.json").write_text(json.dumps(told))
        wait_until_counted("4/known", dist.get_world_size() - 1)
    sys.exit(1)


if __name__ == "__main__":
    main()
