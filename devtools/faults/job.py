"""Job and reports of one reading process: the protocol between the bench and its ranks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Job:
    """Reading job. Rank and world size come from torchrun's environment, else 0 of 1.

    ``options`` are storage options, ``options_of_rank`` those that differ on a rank (by its number as text). With
    ``group`` the ranks have a process group, and with ``meets`` they also meet in an all-reduce after each batch.
    ``pace_s``: how long a batch is "used". ``spend_hedges``: second requests are used up. ``clock_jump_s``: how far
    Python's clock of the process jumps after ten batches. ``user``: whose number it takes once it is
    warm. It ends before ``until_epoch``, or after the batch at which the file ``stop`` in ``folder`` was found.
    """

    url: str
    options: Mapping[str, Any]
    folder: str
    attempt: int = 0
    direct: Mapping[str, Any] = field(default_factory=dict)  # options without faults, to warm the process up with
    options_of_rank: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    loader: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] | None = None
    until_epoch: int = 3
    pace_s: float = 0.01
    group: bool = False
    meets: bool = False
    clock_jump_s: float = 0.0
    user: int = 0
    spend_hedges: bool = False
    samples: int = 0
    sample_bytes: int = 0

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> Job:
        return Job(**json.loads(text))

    def log_of(self, rank: int) -> Path:
        """Log file of a rank: one JSON object a line, each written at once, so that a SIGKILL loses none."""
        return Path(self.folder, f"attempt-{self.attempt:03d}-rank-{rank}.jsonl")
