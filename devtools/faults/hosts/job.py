"""Job of one rank among several hosts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class HostJob:
    """A run of the trainer, or with ``trains=False`` of the loader alone.

    ``waits_at``: where each rank waits for the file ``go`` ("world", "loader", "evaluation"). ``drops``: the loader
    drops samples, so that its ranks exchange their totals. ``meets``: they meet in an all-reduce after each
    batch. ``pace_s``: how long a batch is "used".
    """

    folder: str
    source: str
    attempt: int = 0
    trains: bool = True
    zero: Literal[0, 1, 2, 3] = 0
    epochs: int = 2
    stall_timeout_s: float = 10.0
    meet_timeout_s: float = 1800.0
    save_every: int = 5
    saves_much: bool = False
    evaluates: bool = False
    drops: bool = False
    meets: bool = False
    waits_at: str = ""
    state: Mapping[str, Any] | None = None
    global_batch: int = 12
    sample_bytes: int = 2000
    pace_s: float = 0.1

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> HostJob:
        return HostJob(**json.loads(text))

    def log_of(self, rank: int) -> Path:
        return Path(self.folder, f"attempt-{self.attempt:03d}-rank-{rank}.jsonl")
