"""Run by torchrun on two ranks: ``closed_rank.py SOURCE FOLDER``. Rank 0's loaders fail, and both ranks go on.

Each part tells how many batches its loaders gave on this rank, or what they raised.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock import DistributedDataLoader, Subset

FAILING = 0
WAIT_S = 5.0  # long enough for a process to end, and for others to hear of it
BAD = 70  # the sample on which what decides fails


def fail(sample: dict[str, Any]) -> dict[str, Any]:
    raise ValueError("no such class")


def open_loader(url: str, *, fails: bool = False, **options: Any) -> DistributedDataLoader[Any]:
    fails = fails and dist.get_rank() == FAILING
    return DistributedDataLoader(url, batch_size=10, transform=fail if fails else None, **options)


def read(loader: DistributedDataLoader[Any], *, pause_s: float = 0.0) -> int | str:
    count = 0
    try:
        for _ in loader:
            count += 1
            time.sleep(pause_s)
    except Exception as exc:  # noqa: BLE001 - how it ends is what the test asks
        return f"{type(exc).__name__}: {exc}"
    return count


def close_first(url: str) -> dict[str, int | str]:
    """Rank 1 has closed its loader, or forgotten it, when rank 0's fails; then both make another, and have one."""
    told: dict[str, int | str] = {}
    beside = open_loader(url, shuffle=False)
    for part in ("closed", "forgotten"):
        loader = open_loader(url, fails=True)
        if dist.get_rank() != FAILING:
            read(loader)
            if part == "closed":
                loader.close()
            del loader
            gc.collect()
        dist.barrier()
        if dist.get_rank() == FAILING:
            told[part] = read(loader)
            loader.close()
        dist.barrier()
        with open_loader(url) as following:
            told[f"after {part}"] = read(following, pause_s=0.2)
    told["beside"] = read(beside, pause_s=0.2)
    beside.close()
    return told


def make_in_another_order(url: str) -> dict[str, int | str]:
    """Of two loaders that each rank makes in an order of its own, rank 0's second fails."""
    parts = {"train": Subset.share(0.0, 0.5), "val": Subset.share(0.5, 1.0)}
    names = list(parts) if dist.get_rank() == FAILING else list(parts)[::-1]
    loaders = {name: open_loader(url, subset=parts[name], fails=name == "val") for name in names}
    dist.barrier()
    told = {}
    if dist.get_rank() == FAILING:
        told["val"] = read(loaders["val"])
    dist.barrier()
    told["train"] = read(loaders["train"], pause_s=0.6)
    if dist.get_rank() != FAILING:
        told["val"] = read(loaders["val"], pause_s=0.6)
    for loader in loaders.values():
        loader.close()
    return told


def try_again(url: str, folder: Path) -> dict[str, int | str]:
    """Rank 0 cannot make its loader, and then makes it; that one fails before rank 1 has made its own."""
    told: dict[str, int | str] = {}
    (folder / "file").write_bytes(b"")
    audit_dir = folder / ("file" if dist.get_rank() == FAILING else "audit")
    try:
        with DistributedDataLoader(url, batch_size=10, audit_dir=audit_dir) as loader:
            told["made"] = read(loader, pause_s=0.6)
    except Exception as exc:  # noqa: BLE001 - as above
        told["made"] = f"{type(exc).__name__}: {exc}"
    dist.barrier()
    if dist.get_rank() == FAILING:
        with open_loader(url, fails=True) as loader:
            told["again"] = read(loader)
    dist.barrier()
    if dist.get_rank() != FAILING:
        with open_loader(url) as loader:
            told["again"] = read(loader, pause_s=0.6)
    dist.barrier()
    with open_loader(url) as loader:
        told["last"] = read(loader)
    return told


def keep_or_fail(sample: dict[str, Any]) -> bool:
    if int(sample["txt"]) == BAD:
        raise ValueError("no such class")
    return int(sample["txt"]) % 3 != 0


def drop_or_fail(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if keep_or_fail(sample) else None


def stop_streams(url: str) -> dict[str, Any]:
    """What decides on a sample fails, where ranks meet after each batch, and where rank 1 is slower."""
    told: dict[str, Any] = {}
    ways: dict[str, dict[str, Any]] = {
        "keep": {"keep": keep_or_fail},
        "may_drop": {"transform": drop_or_fail, "may_drop": True},
    }
    for name, options in ways.items():
        for pace in ("meeting", "slower"):
            batches = []
            dist.barrier()
            with DistributedDataLoader(url, batch_size=2, lanes=8, with_ids=True, **options) as loader:
                try:
                    for batch in loader:
                        batches.append(batch["__id__"].tolist())
                        if pace == "meeting":
                            dist.barrier()
                        elif dist.get_rank() == 1:
                            time.sleep(0.3)
                    error = ""
                except Exception as exc:  # noqa: BLE001 - as above
                    error = f"{type(exc).__name__}: {exc} {getattr(exc, '__notes__', '')}"
                dist.barrier()
            told[f"{name} {pace}"] = {"batches": batches, "error": error}
    with DistributedDataLoader(url, batch_size=2, lanes=8, with_ids=True, keep=is_kept) as loader:
        told["good"] = [batch["__id__"].tolist() for batch in loader]
    return told


def is_kept(sample: dict[str, Any]) -> bool:
    return int(sample["txt"]) % 3 != 0


def main() -> None:
    url, folder = sys.argv[1], Path(sys.argv[2])
    dist.init_process_group("gloo")
    told: dict[str, Any] = {
        "first": close_first(url),
        "order": make_in_another_order(url),
        "again": try_again(url, folder),
    }
    told["streams"] = stop_streams(url)
    dist.barrier()
    (folder / f"closed-{dist.get_rank()}.json").write_text(json.dumps(told))

    # At last rank 0 makes one loader more than rank 1, fails with the next, and ends.
    if dist.get_rank() == FAILING:
        with open_loader(url) as loader:
            next(iter(loader))
    with open_loader(url, fails=True) as loader:
        last = read(loader, pause_s=WAIT_S)
    (folder / f"last-{dist.get_rank()}.json").write_text(json.dumps(last))


if __name__ == "__main__":
    main()
