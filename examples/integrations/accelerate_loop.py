"""Accelerate: gradient accumulation and checkpoints around the loader, which ``prepare`` does not shard again.

torchrun --nproc-per-node=2 examples/integrations/accelerate_loop.py --kill-at 13   killed at step 13
python examples/integrations/accelerate_loop.py                                     resumes on one rank
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from common import EPOCHS, Account, Line, make_rows, open_rows, parse_options, report

from penstock.loader.integrations import AccelerateLoader


class Progress:
    """What the loop counts; saved beside the rest."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def main() -> None:
    options = parse_options(__doc__)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)  # an epoch of 20 batches ends with a step of 2
    make_rows(options.folder)
    rows = open_rows(options.folder)
    account = Account(options.folder, rows.rank, options.kill_at)

    model, progress = Line(), Progress()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), AccelerateLoader(rows, accelerator)
    )
    accelerator.register_for_checkpointing(progress)
    checkpoint = options.folder / "accelerate"
    if checkpoint.exists():
        accelerator.load_state(str(checkpoint))

    while rows.epoch < EPOCHS:
        for batch in loader:
            account.note(progress.step, batch["__id__"])
            with accelerator.accumulate(model):
                accelerator.backward(model(batch))
                optimizer.step()
                optimizer.zero_grad()
            progress.step += 1
            if accelerator.sync_gradients:  # not while gradients are being accumulated: they are in no checkpoint
                accelerator.save_state(str(checkpoint))
                accelerator.wait_for_everyone()  # nobody goes on, and is killed, before all is saved
    if accelerator.num_processes == 1:
        report(options.folder)
    accelerator.end_training()


if __name__ == "__main__":
    main()
