"""What the tests of Lightning train: in a module of its own, as importing Lightning takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import CombinedLoader

from penstock import DistributedDataLoader
from penstock.loader.integrations import LightningCallback, TorchLoader

BATCH, STEPS = 10, 12


class KilledError(Exception):
    """Ends training where a kill would."""


class Module(pl.LightningModule):
    """Notes the ids of each batch that it is trained and validated on."""

    def __init__(self, folder: Path, *, kill_at: int | None = None, **options: Any) -> None:
        super().__init__()
        self.line = torch.nn.Linear(1, 1)
        self.folder, self.kill_at, self.options = folder, kill_at, options
        self.trained: dict[int, list[int]] = {}
        self.validated: list[list[int]] = []
        self.made = 0

    def open(self, **options: Any) -> DistributedDataLoader[dict[str, Any]]:
        given = {"batch_size": BATCH, "seed": 5, "with_ids": True, "rank": 0, "world_size": 1, **options}
        return DistributedDataLoader(given.pop("source", str(self.folder / "rows")), **given)

    def train_dataloader(self) -> Any:
        self.made += 1
        return self.open(**self.options)

    def val_dataloader(self) -> Any:
        return self.open(shuffle=False)

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        if self.global_step == self.kill_at:
            raise KilledError
        self.trained[self.global_step] = batch["__id__"].tolist()
        return self.line(batch["x"].float()[:, None]).square().mean()

    def validation_step(self, batch: Any, index: int) -> None:
        self.validated.append(batch["__id__"].tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Estimating(Module):
    """Asks for the number of steps while the optimizer is made, as schedules of one cycle do."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == 3 * STEPS
        return super().configure_optimizers()


class Several(Module):
    """Trains on two loaders at once, of which one is shorter and goes round."""

    def __init__(self, folder: Path, *, short: int = 2 * BATCH, **options: Any) -> None:
        super().__init__(folder, **options)
        self.short_batch = short

    def train_dataloader(self) -> Any:
        return {
            "long": super().train_dataloader(),
            "short": TorchLoader(self.open(batch_size=self.short_batch, seed=9)),
        }

    def training_step(self, batch: Any, index: int) -> torch.Tensor:
        self.short = [*getattr(self, "short", []), batch["short"]["__id__"].tolist()]
        return super().training_step(batch["long"], index)


class Waiting(Several):
    """Its shorter loader waits for the end of the epoch."""

    def train_dataloader(self) -> Any:
        return CombinedLoader(super().train_dataloader(), mode="max_size")


class Endless(Module):
    """Has an iterable without a length beside its loader."""

    def train_dataloader(self) -> Any:
        class Numbers:
            def __iter__(self) -> Iterator[int]:
                return iter(range(10**9))

        return {"long": super().train_dataloader(), "numbers": Numbers()}


def fit(
    module: pl.LightningModule, folder: Path, *, callback: bool = True, resume: bool = False, **options: Any
) -> pl.Trainer:
    saving = {"every_n_train_steps": 5, **options.pop("saving", {})}
    checkpoints = ModelCheckpoint(folder / "saved", save_last=True, **saving)
    given: dict[str, Any] = {
        "max_epochs": 3,
        "limit_val_batches": 0,
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "callbacks": [checkpoints, *([LightningCallback()] if callback else [])],
        **options,
    }
    trainer = pl.Trainer(**given)
    trainer.fit(module, ckpt_path="last" if resume else None)
    return trainer


def killed_and_resumed(folder: Path, kind: type[Module] = Module, *, kill_at: int, **options: Any) -> list[list[int]]:
    """The ids of each step, of a run that was killed before a step and resumed from its last checkpoint."""
    first = kind(folder, kill_at=kill_at)
    with pytest.raises(KilledError):
        fit(first, folder, **options)
    second = kind(folder)
    fit(second, folder, resume=True, **options)
    start = min(second.trained)
    assert 0 < start <= kill_at
    steps = {step: ids for step, ids in first.trained.items() if step < start} | second.trained
    assert sorted(steps) == list(range(3 * STEPS))
    return [steps[step] for step in sorted(steps)]
