"""Lightning: a callback that keeps the loader's epochs and positions true in ``Trainer.fit``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import tree_leaves

from ..data_loader import DistributedDataLoader
from ..errors import ConfigError
from .torch_loader import TorchLoader

try:
    from lightning.pytorch import Callback, LightningModule, Trainer
except ImportError:
    try:  # the same under its other name
        from pytorch_lightning import Callback, LightningModule, Trainer  # type: ignore[assignment]
    except ImportError as exc:
        raise ImportError("LightningCallback needs lightning; install penstock[integrations]") from exc


class LightningCallback(Callback):
    """Starts each of Lightning's epochs in a new epoch of the training loaders, and resumes them exactly.

    Without it Lightning resumes a loader in mid-epoch, too, but drops its state where a checkpoint was saved at an
    epoch's end, or where ``configure_optimizers`` asked for ``trainer.estimated_stepping_batches``; a resumed run then
    repeats the order of epoch 0. And where Lightning leaves an epoch early (``limit_train_batches``), or makes its
    loaders anew, a loader begins the same epoch again.

    A checkpoint that is saved while a batch is trained on, as after an exception, is from before that batch: Lightning
    trains on it again. Where Lightning takes an epoch for one that has ended, or for one that has not, and the loaders
    know better, the callback corrects it: it would count epochs wrong, and begin the next one in the middle of this.

    The number of ranks may change as long as the global batch does not. Mutable state: the trainer, for whoever saves
    after training; what a checkpoint held, until training starts; and where the loaders were behind the last batch that
    was trained on.

    Raises, when training starts:
        ConfigError: the checkpoint has another number of loaders, or is in mid-epoch with another number of batches;
            or Lightning would fetch a batch ahead, which a checkpoint would lose; or batches are cut by batch_tokens;
            or a shorter loader waits for the epoch's end, and would not after a resume.
        StateMismatchError: the checkpoint belongs to another data set, seed or order.
    """

    def __init__(self) -> None:
        self._to_load: dict[str, Any] | None = None
        self._trainer: Trainer | None = None
        self._trained = _NOTHING

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the states of a checkpoint into the loaders of this run."""
        self._trainer = trainer
        loaders = _find_loaders(trainer)
        _check_counts(loaders, trainer)
        saved, self._to_load, self._trained = self._to_load, None, _NOTHING
        if saved is None or not saved["loaders"]:  # a checkpoint from before training holds none
            return
        is_end = saved.get("is_epochs_end", not any(one["state"]["consumed"] for one in saved["loaders"]))
        if not (is_end and trainer.overfit_batches):  # type: ignore[attr-defined]
            _load(loaders, saved["loaders"], is_epochs_end=is_end)
        _tell_lightning(trainer, is_epochs_end=is_end)
        self._trained = _note(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to an epoch that was not begun yet; Lightning does not call this when it resumes in mid-epoch."""
        if not trainer.overfit_batches:  # type: ignore[attr-defined]
            loaders = _find_loaders(trainer)  # new ones, with reload_dataloaders_every_n_epochs
            before = [_next_epoch(one["state"]) for one in self._trained.loaders]
            if len(before) != len(loaders):
                before = [trainer.current_epoch] * len(loaders)
            for loader, epoch in zip(loaders, before, strict=True):
                loader.set_epoch(max(epoch, _next_epoch(loader.state_dict())))
        self._trained = _note(trainer)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Note the position behind the batch, before the next one is fetched."""
        self._trained = _note(trainer)

    def state_dict(self) -> dict[str, Any]:
        """The training loaders' positions behind the last batch that was trained on, the same on every rank."""
        if self._trainer is None:
            return {"loaders": []}
        trained = _note(self._trainer)
        if trained.batches == self._trained.batches:
            trained = self._trained  # a batch may have been fetched since, which is lost with what interrupts it
        loop: Any = self._trainer.fit_loop
        progress = loop.epoch_loop.batch_progress
        is_epochs_end = progress.is_last_batch and progress.current.ready == progress.current.processed
        return {"loaders": trained.loaders, "is_epochs_end": is_epochs_end}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of a checkpoint until the loaders are there."""
        self._to_load = state_dict


@dataclass(frozen=True, kw_only=True)
class _Trained:
    """The loaders' places after a number of batches of a run."""

    batches: int
    loaders: list[dict[str, Any]]


_NOTHING = _Trained(batches=-1, loaders=[])


def _note(trainer: Trainer) -> _Trained:
    loop: Any = trainer.fit_loop
    loaders = [{"state": loader.state_dict(), "batches": len(loader)} for loader in _find_loaders(trainer)]
    return _Trained(batches=loop.epoch_loop.batch_progress.total.processed, loaders=loaders)


def _next_epoch(state: Mapping[str, Any]) -> int:
    """Find the first epoch of which nothing was handed out."""
    return int(state["epoch"]) + (1 if state["consumed"] else 0)


def _tell_lightning(trainer: Trainer, *, is_epochs_end: bool) -> None:
    """Have Lightning begin a new epoch after an epoch's end, and continue the one that it was stopped in.

    After an end that was saved at an epoch's last batch it would train on the next epoch without having begun it, so
    that a checkpoint of that one resumes in the epoch after; and with max_steps on one batch, as on a whole epoch. An
    epoch that max_steps, max_time or early stopping ended, it would take for a whole one.
    """
    loop: Any = trainer.fit_loop
    total, current = loop.epoch_progress.total, loop.epoch_progress.current
    if not current.ready or current.ready != current.processed:
        return  # Lightning continues in this epoch, if only to end it
    for counts in (total, current):
        counts.processed = counts.completed = counts.ready - (0 if is_epochs_end else 1)
    if is_epochs_end:
        loop.epoch_loop.restarting = False
        loop.reset_restart_stage()
    else:
        loop.restarting = True
        loop.update_restart_stage()


def _find_loaders(trainer: Trainer) -> list[DistributedDataLoader[Any]]:
    """Find the penstock loaders that are trained on, in the order of Lightning's collection of loaders."""
    leaves = tree_leaves(trainer.train_dataloader)
    found = [leaf.loader if isinstance(leaf, TorchLoader) else leaf for leaf in leaves]
    return [loader for loader in found if isinstance(loader, DistributedDataLoader)]


def _check_counts(loaders: list[DistributedDataLoader[Any]], trainer: Trainer) -> None:
    """Raise ConfigError where Lightning cannot count an epoch's batches before it."""
    if any(loader.drops_samples for loader in loaders):
        raise ConfigError(
            "LightningCallback: a loader that drops or packs samples (keep=, may_drop=, packing= or on_error='skip'): "
            "how many batches an epoch has is known only by reading it, and Lightning counts them; loop over the "
            "loader yourself, or train with DistributedTrainer"
        )
    if any(loader.is_batched_by_tokens for loader in loaders):
        raise ConfigError(
            "LightningCallback: with batch_tokens= each epoch has a number of batches of its own, and Lightning ends "
            "all of them after as many as the first has; give the loader batch_size=, with bucket= against padding"
        )
    mode = getattr(getattr(trainer.fit_loop, "_combined_loader", None), "_mode", None)
    if mode == "max_size" and len({len(loader) for loader in loaders}) > 1:
        raise ConfigError(
            "LightningCallback: with CombinedLoader(mode='max_size') a loader that has ended gives None until the "
            "epoch ends, and after a resume in mid-epoch Lightning would begin its next epoch instead; use "
            "mode='max_size_cycle' or 'min_size'"
        )
    if loaders and math.isinf(trainer.num_training_batches):
        raise ConfigError(
            "LightningCallback: an iterable without __len__ stands beside a penstock loader, so Lightning fetches "
            "a batch ahead, and a checkpoint would lose it; give the iterable a __len__"
        )


def _load(loaders: list[DistributedDataLoader[Any]], saved: list[dict[str, Any]], *, is_epochs_end: bool) -> None:
    if len(loaders) != len(saved):
        raise ConfigError(
            f"LightningCallback: the checkpoint holds the positions of {len(saved)} training loaders, and there are "
            f"{len(loaders)}; train on those of the run that is to be continued"
        )
    for loader, one in zip(loaders, saved, strict=True):
        loader.load_state_dict(one["state"])
        if is_epochs_end and one["state"]["consumed"]:
            loader.set_epoch(one["state"]["epoch"] + 1)  # Lightning left it early, as for limit_train_batches
        elif one["state"]["consumed"] and one["batches"] != len(loader):
            raise ConfigError(
                f"LightningCallback: an epoch had {one['batches']} batches when the checkpoint was saved in mid-epoch, "
                f"and has {len(loader)} now, with a global batch of {loader.global_batch_size}; Lightning counts in "
                "batches, so the rest of the epoch would be left out or repeated. Give the loader the "
                "global_batch_size of that run, or resume from a checkpoint at an epoch's end"
            )
