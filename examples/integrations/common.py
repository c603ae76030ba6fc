"""What these examples share: made-up rows, a small model, a kill, and an account of what was trained on.

The account is what they show: a run is killed in mid-epoch on two ranks and resumed on one, and every sample was
trained on exactly once an epoch.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import torch

from penstock import DistributedDataLoader, pack

ROWS, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 480, 24, 2, 5
STEPS_PER_EPOCH = ROWS // GLOBAL_BATCH


def parse_options(doc: str | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("integration-run"), help="data, checkpoints, account")
    parser.add_argument("--ranks", type=int, default=1, help="ranks to start, where the framework starts them")
    parser.add_argument("--kill-at", type=int, help="kill -9 of each process before it trains on this step")
    return parser.parse_args()


def make_rows(folder: Path) -> None:
    """Write the rows; of several ranks that do, the first one's stay."""
    if (folder / "rows").exists():
        return
    own = folder / f"rows-of-{os.getpid()}"
    rows = ({"x": i / ROWS, "y": 3 * i / ROWS - 1} for i in range(ROWS))
    pack(rows, str(own), format="parquet", shard_bytes=2000, progress=False)
    try:
        own.rename(folder / "rows")
    except OSError:
        shutil.rmtree(own)


def open_rows(folder: Path, **options: Any) -> DistributedDataLoader[dict[str, Any]]:
    """The loader of every example; ``global_batch_size``, so that an epoch has as many steps on any number of ranks."""
    given = {"global_batch_size": GLOBAL_BATCH, "seed": 3, "with_ids": True, **options}
    return DistributedDataLoader(str(folder / "rows"), **given)


class Line(torch.nn.Module):
    """A line through the rows; returns the loss of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        x, y = batch["x"].float()[:, None], batch["y"].float()[:, None]
        return torch.nn.functional.mse_loss(self.line(x), y)


class Account:
    """Which samples each step trained on: a file for each attempt and rank, and a line for each step."""

    def __init__(self, folder: Path, rank: int, kill_at: int | None) -> None:
        self._folder, self._rank, self._kill_at = folder, rank, kill_at
        self._path: Path | None = None

    def note(self, step: int, ids: torch.Tensor) -> None:
        """Called before the step is taken."""
        if step == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self._path is None:
            self._path = self._folder / f"attempt-from-{step:03d}-rank-{self._rank}.jsonl"
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step, "ids": ids.tolist()}) + "\n")


def read_account(folder: Path) -> list[list[int]]:
    """The ids of each step of all ranks: of its last attempt, as an earlier one's work after its checkpoint is lost."""
    steps: dict[int, list[int]] = {}
    files = sorted(folder.glob("attempt-from-*.jsonl"))
    for start in sorted({path.name.split("-")[2] for path in files}):
        steps = {step: ids for step, ids in steps.items() if step < int(start)}
        for path in folder.glob(f"attempt-from-{start}-*.jsonl"):
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                steps.setdefault(entry["step"], []).extend(entry["ids"])
    return [steps[step] for step in sorted(steps)]


def report(folder: Path) -> None:
    """Print how often each sample of an epoch was trained on."""
    steps = read_account(folder)
    for epoch in range(len(steps) // STEPS_PER_EPOCH):
        seen = Counter(i for ids in steps[epoch * STEPS_PER_EPOCH :][:STEPS_PER_EPOCH] for i in ids)
        once = sum(count == 1 for count in seen.values())
        print(f"epoch {epoch}: {once} of {ROWS} samples trained on exactly once, {len(seen) - once} more often")
