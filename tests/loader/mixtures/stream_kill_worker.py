"""One rank of a run of a mixture that filters: it saves its position on the way, and may be killed.

stream_kill_worker.py FOLDER STEPS KILL_AT: begins where FOLDER/state.json says, with another mixture then.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock import DistributedDataLoader, Mixture, Source
from penstock.loader import Keep, MixtureChangedWarning

EVERY = 4


def thirds(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if sample["n"] % 3 else None


def main(folder: Path, steps: int, kill_at: int) -> None:
    dist.init_process_group("gloo")
    saved = folder / "state.json"
    sources = {
        "a": Source(folder / "a", weight=0.5 if saved.exists() else 2, transform=thirds, may_drop=True),
        "b": Source(folder / "b"),
    }
    if saved.exists():
        sources["c"] = Source(folder / "c", keep=Keep(["n"], lambda columns: columns["n"] % 2 == 0))
    with DistributedDataLoader(
        Mixture(sources, stop="first_exhausted"), global_batch_size=12, lanes=8, threads=1, audit_dir=folder / "audit"
    ) as loader:
        if saved.exists():
            warnings.simplefilter("ignore", MixtureChangedWarning)
            loader.load_state_dict(json.loads(saved.read_text()))
        step = 0
        while step < steps:
            for _ in loader:
                step += 1
                if step == kill_at and dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(os.getpid(), signal.SIGKILL)
                dist.barrier()  # as the collectives of training
                if step % EVERY == 0 or step == steps:
                    save(saved, loader.state_dict())
                if step == steps:
                    break
        dist.barrier()
    dist.destroy_process_group()


def save(saved: Path, state: dict[str, Any]) -> None:
    """Write a state that must be the same on all ranks."""
    same: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(same, state)
    assert all(each == state for each in same)
    if dist.get_rank() == 0:
        saved.with_suffix(".new").write_text(json.dumps(state))
        saved.with_suffix(".new").replace(saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
