"""Hugging Face's Trainer: ``resume_from_checkpoint`` in mid-epoch, on another number of ranks; skipping reads nothing.

torchrun --nproc-per-node=2 examples/integrations/hf_trainer.py --kill-at 13   killed at step 13
python examples/integrations/hf_trainer.py                                     resumes on one rank
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from common import EPOCHS, GLOBAL_BATCH, SAVE_EVERY, Account, Line, make_rows, open_rows, parse_options, report
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from penstock import DistributedDataLoader
from penstock.loader.integrations import TorchLoader, TransformersCallback


class Model(torch.nn.Module):
    """As the Trainer wants it: the batch's fields as arguments, the loss in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Line()

    def forward(self, **batch: Any) -> dict[str, torch.Tensor]:
        return {"loss": self.model(batch)}


class RowsTrainer(Trainer):
    """Trains on a penstock loader, which knows its share of the data: nothing goes through Accelerate's ``prepare``."""

    def __init__(self, rows: DistributedDataLoader[dict[str, Any]], account: Account, **options: Any) -> None:
        super().__init__(**options)
        self.rows, self.account = rows, account

    def get_train_dataloader(self) -> TorchLoader:  # type: ignore[override]
        return TorchLoader(self.rows)

    def training_step(self, model: torch.nn.Module, inputs: dict[str, Any], *rest: Any) -> torch.Tensor:
        self.account.note(self.state.global_step, inputs["__id__"])
        return super().training_step(model, inputs, *rest)


def main() -> None:
    options = parse_options(__doc__)
    folder: Path = options.folder
    make_rows(folder)
    arguments = TrainingArguments(
        output_dir=str(folder / "hf"),
        use_cpu=True,
        num_train_epochs=EPOCHS,
        save_steps=SAVE_EVERY,
        report_to=[],
        disable_tqdm=True,
    )
    arguments.per_device_train_batch_size = GLOBAL_BATCH // arguments.world_size  # what the Trainer's logs speak of
    rows = open_rows(folder)
    callbacks: list[TrainerCallback] = [TransformersCallback()]
    account = Account(folder, rows.rank, options.kill_at)
    trainer = RowsTrainer(rows, account, model=Model(), args=arguments, callbacks=callbacks)
    saved = get_last_checkpoint(arguments.output_dir) if (folder / "hf").exists() else None
    trainer.train(resume_from_checkpoint=saved)
    if arguments.world_size == 1:
        report(folder)


if __name__ == "__main__":
    main()
