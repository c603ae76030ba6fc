"""Lightning: a callback that keeps the loader's epochs and positions true in ``Trainer.fit``."""

from __future__ import annotations

import math
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

    The number of ranks may change as long as the global batch does not. Mutable state: the trainer, for whoever saves
    after training; the states to load, until training starts; and whether any were, until an epoch starts.

    Raises, when training starts:
        ConfigError: the checkpoint has another number of loaders, or is in mid-epoch with another number of batches;
            or Lightning would fetch a batch ahead, which a checkpoint would lose.
        StateMismatchError: the checkpoint belongs to another data set, seed or order.
    """

    def __init__(self) -> None:
        self._to_load: list[dict[str, Any]] | None = None
        self._trainer: Trainer | None = None
        self._has_loaded = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the states of a checkpoint into the loaders of this run."""
        self._trainer = trainer
        loaders = _find_loaders(trainer)
        if loaders and math.isinf(trainer.num_training_batches):
            raise ConfigError(
                "LightningCallback: an iterable without __len__ stands beside a penstock loader, so Lightning fetches "
                "a batch ahead, and a checkpoint would lose it; give the iterable a __len__"
            )
        if self._to_load:  # a checkpoint from before training holds none
            _load(loaders, self._to_load)
        self._has_loaded, self._to_load = bool(self._to_load), None

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go to an epoch that was not begun yet; Lightning does not call this when it resumes in mid-epoch."""
        if trainer.overfit_batches:  # type: ignore[attr-defined]
            return  # the same batches again are what is wanted
        for loader in _find_loaders(trainer):
            state = loader.state_dict()
            if state["consumed"] and self._has_loaded and trainer.limit_train_batches == 1.0:
                # With max_steps Lightning takes an epoch's end that it resumes from for an epoch of one more batch.
                loader.load_state_dict(state)
                continue
            upcoming = state["epoch"] + (1 if state["consumed"] else 0)
            loader.set_epoch(max(trainer.current_epoch, upcoming))
        self._has_loaded = False

    def state_dict(self) -> dict[str, Any]:
        """The training loaders' positions, the same on every rank."""
        loaders = [] if self._trainer is None else _find_loaders(self._trainer)
        return {"loaders": [{"state": loader.state_dict(), "batches": len(loader)} for loader in loaders]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the states of a checkpoint until the loaders are there."""
        self._to_load = state_dict["loaders"]


def _find_loaders(trainer: Trainer) -> list[DistributedDataLoader[Any]]:
    """The penstock loaders that are trained on, in the order of Lightning's collection of loaders."""
    leaves = tree_leaves(trainer.train_dataloader)
    found = [leaf.loader if isinstance(leaf, TorchLoader) else leaf for leaf in leaves]
    return [loader for loader in found if isinstance(loader, DistributedDataLoader)]


def _load(loaders: list[DistributedDataLoader[Any]], saved: list[dict[str, Any]]) -> None:
    if len(loaders) != len(saved):
        raise ConfigError(
            f"LightningCallback: the checkpoint holds the positions of {len(saved)} training loaders, and there are "
            f"{len(loaders)}; train on those of the run that is to be continued"
        )
    for loader, one in zip(loaders, saved, strict=True):
        loader.load_state_dict(one["state"])  # first: with batch_tokens=, each epoch has a number of its own
        if one["state"]["consumed"] and one["batches"] != len(loader):
            raise ConfigError(
                f"LightningCallback: an epoch had {one['batches']} batches when the checkpoint was saved in mid-epoch, "
                f"and has {len(loader)} now, with a global batch of {loader.global_batch_size}; Lightning counts in "
                "batches, so the rest of the epoch would be left out or repeated. Give the loader the "
                "global_batch_size of that run, or resume from a checkpoint at an epoch's end"
            )
