"""Lightning: fit with validation, its own launcher, and a resume in mid-epoch on another number of ranks.

    python examples/integrations/lightning_fit.py --ranks 2 --kill-at 13   killed at step 13; a checkpoint is at step 10
    python examples/integrations/lightning_fit.py                          resumes on one rank

The loaders are made in ``train_dataloader`` and ``val_dataloader``, which Lightning calls when its ranks are there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import EPOCHS, SAVE_EVERY, Account, Line, make_rows, open_rows, parse_options, report
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from penstock import DistributedDataLoader
from penstock.loader.integrations import LightningCallback


class Module(LightningModule):
    def __init__(self, folder: Path, kill_at: int | None) -> None:
        super().__init__()
        self.model = Line()
        self.folder, self.kill_at = folder, kill_at

    def train_dataloader(self) -> DistributedDataLoader[dict[str, Any]]:
        self.loader = open_rows(self.folder)
        self.account = Account(self.folder, self.loader.rank, self.kill_at)
        return self.loader

    def val_dataloader(self) -> DistributedDataLoader[dict[str, Any]]:
        return open_rows(self.folder, shuffle=False)

    def training_step(self, batch: dict[str, Any], index: int) -> torch.Tensor:
        self.account.note(self.global_step, batch["__id__"])
        return self.model(batch)

    def validation_step(self, batch: dict[str, Any], index: int) -> None:
        self.log("loss", self.model(batch), batch_size=len(batch["x"]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    options = parse_options(__doc__)
    make_rows(options.folder)
    checkpoints = ModelCheckpoint(options.folder / "lightning", every_n_train_steps=SAVE_EVERY, save_last=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=options.ranks,
        strategy="ddp" if options.ranks > 1 else "auto",
        max_epochs=EPOCHS,
        limit_val_batches=4,  # the same four each time
        callbacks=[LightningCallback(), checkpoints],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(options.folder, options.kill_at), ckpt_path="last")
    if trainer.world_size == 1:
        report(options.folder)


if __name__ == "__main__":
    main()
