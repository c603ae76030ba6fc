"""Lightning Fabric: a loop of one's own, with the loader set up and saved like model and optimizer.

torchrun --nproc-per-node=2 examples/integrations/fabric_loop.py --ranks 2 --kill-at 13   killed at step 13
python examples/integrations/fabric_loop.py                                               resumes on one rank
"""

from __future__ import annotations

from typing import Any

import torch
from common import EPOCHS, SAVE_EVERY, Account, Line, make_rows, open_rows, parse_options, report
from lightning.fabric import Fabric

from penstock.loader.integrations import TorchLoader


def main() -> None:
    options = parse_options(__doc__)
    fabric = Fabric(accelerator="cpu", devices=options.ranks, strategy="ddp" if options.ranks > 1 else "auto")
    fabric.launch()
    make_rows(options.folder)
    rows = open_rows(options.folder)
    account = Account(options.folder, rows.rank, options.kill_at)

    model = Line()
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    loader = fabric.setup_dataloaders(TorchLoader(rows))
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "loader": loader, "step": 0}
    checkpoint = options.folder / "fabric.ckpt"
    if checkpoint.exists():
        fabric.load(checkpoint, state)

    while rows.epoch < EPOCHS:
        for batch in loader:
            account.note(state["step"], batch["__id__"])
            optimizer.zero_grad()
            fabric.backward(model(batch))
            optimizer.step()
            state["step"] += 1
            if state["step"] % SAVE_EVERY == 0:
                fabric.save(checkpoint, state)
    if fabric.world_size == 1:
        report(options.folder)


if __name__ == "__main__":
    main()
