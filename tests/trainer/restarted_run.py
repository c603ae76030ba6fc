"""Run by torchrun on the loader: one rank may be killed in mid-epoch, and evaluation takes its time."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from tar_rows import square_x, training

from penstock import DistributedDataLoader
from penstock.trainer import Evaluation, close_world, open_world


def main(folder: Path, kill_at: int, evaluate_every: int) -> None:
    world = open_world(device="cpu")
    is_first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    steps_here = 0

    def loss(model: Any, batch: Any) -> Any:
        nonlocal steps_here
        steps_here += 1
        if is_first_start and world.rank == 1 and steps_here == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return square_x(model, batch)

    def measure(model: Any, batch: Any) -> Any:
        if not (folder / "hurry").exists():
            (folder / f"evaluating-{world.rank}").touch()
            time.sleep(0.5)
        return {"loss": square_x(model, batch)}

    with (
        DistributedDataLoader(
            str(folder / "shards"), batch_size=2, rank=world.rank, world_size=world.world_size
        ) as test,
        training(
            world,
            folder,
            loss=loss,
            evaluation=Evaluation(batches=test, metrics=measure),
            evaluate={"every": evaluate_every},
            checkpoint={"every_steps": 5},
        ) as trainer,
    ):
        summary = trainer.train()
    print(f"rank {world.rank} ends at step {summary.steps}, stopped early: {summary.stopped_early}", flush=True)
    close_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
