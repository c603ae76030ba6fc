"""What ranks say of themselves, written without any."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from penstock.trainer.report.status.rank_status import RankStatus, status_path


def write(folder: Path, rank: int = 0, world_size: int = 2, **values: Any) -> None:
    """A rank that trains, as its status says."""
    now_s = time.time()
    start = {"host": "node-a", "pid": 7, "device": "cpu", "time": now_s, "every_s": 1.0, "began_s": now_s - 60}
    seconds = {"fetch": 0.1, "forward": 3.0, "backward": 6.0}
    rates = {"state": "training", "window_s": 10.0, "steps": 100, "step": 120, "phase": "backward", "seconds": seconds}
    more = {"samples_per_s": 640.0, "total_steps": 500, "memory": {"host_memory_bytes": 1 << 30}}
    recent = {"bottleneck": "consumer", "ready_batches": 12}
    status = RankStatus(rank=rank, world_size=world_size, **{**start, **rates, **more, "recent": recent, **values})
    (folder / "ranks").mkdir(exist_ok=True)
    status_path(folder, rank).write_text(status.to_text())
