"""Hugging Face's Trainer: a callback that keeps the loader's position in the Trainer's checkpoints."""

from __future__ import annotations

from typing import Any

from ..errors import ConfigError
from .torch_loader import TorchLoader

try:
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
except ImportError as exc:
    raise ImportError("TransformersCallback needs transformers; install penstock[integrations]") from exc

_KEY = "penstock_loader"  # in the stateful_callbacks of trainer_state.json


class TransformersCallback(TrainerCallback):
    """Saves the training loader's position in ``trainer_state.json``, and loads it when the Trainer resumes.

    The Trainer's ``get_train_dataloader`` must return a ``TorchLoader``. Resume with ``resume_from_checkpoint`` and
    leave ``ignore_data_skip`` False: the Trainer then skips to the batch at which the loader is, which reads nothing.
    The number of ranks may change as long as the global batch does not.

    Raises, when training begins:
        ConfigError: the training loader is not a ``TorchLoader``; or a checkpoint cannot be continued exactly.
        StateMismatchError: the checkpoint belongs to another data set, seed or order.
    """

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Load the position of the checkpoint that the Trainer resumes from."""
        loader = kwargs.get("train_dataloader")
        if not isinstance(loader, TorchLoader):
            raise ConfigError(
                f"TransformersCallback: the Trainer's training loader is a {type(loader).__name__}; override "
                "get_train_dataloader in a subclass of Trainer, and return TorchLoader(loader) from it"
            )
        if loader.loader.is_batched_by_tokens:
            raise ConfigError(
                "TransformersCallback: with batch_tokens= each epoch has a number of batches of its own, and the "
                "Trainer counts epochs by that of one; give the loader batch_size=, with bucket= against padding"
            )
        if state.global_step == 0:
            return
        saved = _read(state)
        _check_steps(saved, loader, args)
        loader.load_state_dict(saved["attributes"]["state"])

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the position: the Trainer saves after this."""
        _note(state, kwargs["train_dataloader"])

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Note the position: the Trainer saves after this."""
        _note(state, kwargs["train_dataloader"])


def _note(state: TrainerState, loader: TorchLoader) -> None:
    attributes = {"state": loader.state_dict(), "steps_per_epoch": len(loader)}
    state.stateful_callbacks[_KEY] = {"args": {}, "attributes": attributes}  # type: ignore[index, call-overload]


def _read(state: TrainerState) -> dict[str, Any]:
    saved: dict[str, Any] | None = state.stateful_callbacks.get(_KEY)  # type: ignore[union-attr]
    if saved is None:
        raise ConfigError(
            f"TransformersCallback: the checkpoint at step {state.global_step} holds no position of the loader, as it "
            "was saved without this callback; start from its weights instead (Trainer(model=...) without "
            "resume_from_checkpoint)"
        )
    return saved


def _check_steps(saved: dict[str, Any], loader: TorchLoader, args: TrainingArguments) -> None:
    """Raise ConfigError unless the Trainer, which counts an epoch's steps from global_step alone, counts right."""
    then = saved["attributes"]["steps_per_epoch"]
    if then != len(loader):
        raise ConfigError(
            f"TransformersCallback: an epoch had {then} batches when the checkpoint was saved, and has {len(loader)} "
            f"now, with a global batch of {loader.loader.global_batch_size}; the Trainer counts in batches and would "
            "be in another place than the loader. Give the loader the global_batch_size of that run"
        )
    if args.ignore_data_skip and saved["attributes"]["state"]["consumed"]:
        raise ConfigError(
            "TransformersCallback: ignore_data_skip=True makes the Trainer count the rest of the epoch as a whole one, "
            "so its last accumulated gradients are not applied; leave it False: skipping costs no reading here"
        )
