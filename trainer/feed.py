"""Where microbatches come from: the loader's epochs, one after another, and its position in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch

from .batches import move_batch
from .errors import TrainerError


class Feed:
    """Takes a loader's batches in groups. Any iterable works; one with ``state_dict`` resumes at the exact sample.

    The microbatches of a step are taken before it begins, so that the loader's position after the step is exact.
    All mutable state besides the loader's: the epoch's iterator, the last batch's epoch, and whether an epoch just
    ended.
    """

    def __init__(self, loader: Iterable[Any], *, accumulate: int, device: torch.device) -> None:
        self.loader = loader
        self._accumulate = accumulate
        self._device = device
        self._batches: Iterator[Any] | None = None
        self._epoch: int | None = None  # of the last batch
        self._found_none = False  # the last take found no batch
        self._epoch_is_over = False  # known only to a run that resumes between an epoch's last step and its end

    @property
    def is_exact(self) -> bool:
        """Whether the loader can resume at the exact sample."""
        return hasattr(self.loader, "state_dict") and hasattr(self.loader, "load_state_dict")

    def take(self, epoch: int) -> list[Any]:
        """The microbatches of the next step, on the device: fewer at the epoch's end, and none once after it.

        Raises:
            TrainerError: an epoch has no batch.
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
            # Read here: when the loop finds the loader empty, the loader is at the next epoch.
            self._epoch = getattr(self.loader, "epoch", None)
            taken.append(move_batch(batch, self._device))
        if taken:
            self._found_none = False
            return taken
        self._batches = None
        # The first empty take is an epoch's end, also of one that a resumed loader had finished before. A second one
        # in a row is an epoch without a batch.
        if self._found_none:
            raise TrainerError(
                f"epoch {epoch}: loader={type(self.loader).__name__} gave no batch; is it an exhausted iterator, or "
                "is the batch size above the number of samples?"
            )
        self._found_none = True
        return []

    def state_dict(self) -> dict[str, Any]:
        """The loader's state if it has one, the epoch of its last batch, and whether the caller saw its end."""
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
