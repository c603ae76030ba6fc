"""Where microbatches come from: the loader's epochs, one after the other, and its position in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from .batches import move_batch
from .errors import TrainerError


class Feed:
    """Takes a loader's batches in groups; any iterable will do, one with ``state_dict`` can be continued exactly.

    The microbatches of a step are taken before it begins, so that the loader's position after the step is exact.
    All mutable state beside the loader's: the epoch's iterator, and what is known of epochs without batches.
    """

    def __init__(self, loader: Iterable[Any], *, accumulate: int, device: torch.device) -> None:
        self.loader = loader
        self._accumulate = accumulate
        self._device = device
        self._batches: Iterator[Any] | None = None
        self._epoch: int | None = None  # of the last batch
        self._empty_epochs = 0
        self._epoch_is_over = False  # known only to a run that resumes between an epoch's last step and its end

    @property
    def is_exact(self) -> bool:
        """Whether the loader can continue at the exact sample."""
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def take(self, epoch: int) -> list[Any]:
        """The microbatches of the next step on the device, fewer at the epoch's end, none after it.

        Raises:
            TrainerError: there are no batches at all.
        """
        if self._epoch_is_over:
            self._epoch_is_over = False
            return []
        if self._batches is None:
            if not self.is_exact and hasattr(self.loader, "set_epoch"):
                self.loader.set_epoch(epoch)
            self._batches = iter(self.loader)
        taken = []
        for batch in islice(self._batches, self._accumulate):
            # Asked now: a loader that is found empty in the same step is at the next epoch.
            self._epoch = getattr(self.loader, "epoch", None)
            taken.append(move_batch(batch, self._device))
        if taken:
            self._empty_epochs = 0
            return taken
        self._batches = None
        self._empty_epochs += 1
        # A loader that resumes at an epoch's end may have none left in it; one without any in two epochs has none.
        if self._empty_epochs > 1:
            raise TrainerError(
                f"epoch {epoch}: loader={type(self.loader).__name__} gave no batch; is it an iterator that is spent, "
                "or a batch size above the number of samples?"
            )
        return []

    def state_dict(self) -> dict[str, Any]:
        """The loader's state, where it has one, the epoch of its last batch, and whether that epoch's end was told."""
        if not self.is_exact:
            return {"loader": None}
        return {
            "loader": self.loader.state_dict(),  # type: ignore[attr-defined]
            "epoch": self._epoch,
            "end_was_told": self._batches is None and not self._epoch_is_over,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._batches = None
        if state["loader"] is None or not self.is_exact:
            return
        self.loader.load_state_dict(state["loader"])  # type: ignore[attr-defined]
        self._epoch = state["epoch"]
        ended = self._epoch is not None and getattr(self.loader, "epoch", self._epoch) > self._epoch
        self._epoch_is_over = ended and not state["end_was_told"]
