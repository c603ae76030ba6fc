"""Run by torchrun: trains with checkpoints; on the first start rank 1 is killed in the middle of a step."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from typing import Any

import torch
from small_trainers import Line, make_trainer, rows, square
from torch import nn

from penstock.trainer import close_world, open_world


class Noisy(Line):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.line(nn.functional.dropout(x, 0.5, self.training))


def main(folder: str, kill_at: int) -> None:
    world = open_world(device="cpu")
    first_start = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    steps_here = 0

    def loss(model: nn.Module, batch: Any) -> Any:
        nonlocal steps_here
        steps_here += 1
        if first_start and world.rank == 1 and steps_here == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return square(model, batch)

    for where, kill in ((folder, True), (tempfile.mkdtemp(dir=folder, prefix=f"unbroken-{world.rank}-"), False)):
        # The unbroken run writes no checkpoints, so that each rank may have a folder of its own.
        options: dict[str, Any] = {"checkpoint": {"every_steps": 4}} if kill else {}
        loader = rows(world, seed=5)
        with make_trainer(
            world, where, loader, Noisy(), loss=loss if kill else square, steps=18, stall_timeout_s=60.0, **options
        ) as trainer:
            began = trainer.progress.step
            trainer.train()
            weights = [parameter.detach().clone() for parameter in trainer.parallel.inner.parameters()]
        name = "killed" if kill else "whole"
        torch.save({"began": began, "weights": weights}, f"{folder}/{name}-{world.rank}.pt")
    close_world()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
