"""One rank of a run that drops samples: it saves its position, and may be killed, or its loader's process may be."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from penstock import DistributedDataLoader

EPOCHS, EVERY = 2, 4


def drop_thirds(sample: dict[str, Any]) -> dict[str, Any] | None:
    return sample if int(sample["txt"]) % 3 else None


def main(source: str, folder: Path, kill_at: int, places: list[str]) -> None:
    dist.init_process_group("gloo")
    place: Any = places[dist.get_rank() % len(places)]
    saved = folder / "state.json"
    with DistributedDataLoader(
        source,
        global_batch_size=12,
        transform=drop_thirds,
        may_drop=True,
        last_batch="partial",
        lanes=16,
        audit_dir=folder / "audit",
        place=place,
    ) as loader:
        if saved.exists():
            loader.load_state_dict(json.loads(saved.read_text()))
        step = 0
        while loader.state_dict()["epoch"] < EPOCHS:
            for _ in loader:
                step += 1
                if step == kill_at and dist.get_rank() == dist.get_world_size() - 1:
                    os.kill(loader.metrics().loader_process or os.getpid(), signal.SIGKILL)
                dist.barrier()  # as the collectives of training
                state = loader.state_dict()
                if step % EVERY == 0:
                    same: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(same, state)
                    assert all(each == state for each in same)
                    if dist.get_rank() == 0:
                        saved.with_suffix(".new").write_text(json.dumps(state))
                        saved.with_suffix(".new").replace(saved)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:] or ["threads"])
