"""torchdata: the loader as the source of a graph of ``torchdata.nodes``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..decoding.row_work import BatchT

if TYPE_CHECKING:
    from ..data_loader import DistributedDataLoader

try:
    from torchdata.nodes import BaseNode
except ImportError as exc:
    raise ImportError("LoaderNode needs torchdata; install penstock[integrations]") from exc


class LoaderNode(BaseNode[BatchT]):  # type: ignore[misc]
    """The batches of a loader as a ``torchdata.nodes`` source; ``torchdata.nodes.Loader`` makes passes over it.

    Its state is the loader's and the epoch of the pass, so a graph over it resumes exactly, and on another number of
    ranks, if the graph is the same: a pass whose last batch was handed out has ended, and the next one begins with
    ``reset``. Nodes above it may work in threads (``Prefetcher``, ``ParallelMapper`` with ``method="thread"``). They
    are ahead of the loop, so where a loop was left cannot be known here: each pass begins a new epoch, whether the
    one before was left early or not.

    Mutable state: the newest pass, and the epoch in which it began. Used by one thread at a time.
    """

    def __init__(self, loader: DistributedDataLoader[BatchT]) -> None:
        super().__init__()
        self._loader = loader
        self._pass: Iterator[BatchT] = iter(())
        self._epoch: int | None = None

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin a pass: at a state, else in the next epoch; the first pass, where the loader is."""
        super().reset(initial_state)
        if initial_state is not None:
            state = initial_state.get("loader", initial_state)  # the loader's alone, as it was saved at first
            self._loader.load_state_dict(state)
            self._epoch = initial_state.get("pass_epoch", state["epoch"])
            if self._epoch != state["epoch"]:
                self._pass = iter(())
                return
        elif self._epoch is not None:
            self._loader.set_epoch(self._epoch + 1)
        self._epoch = self._loader.state_dict()["epoch"]
        self._pass = iter(self._loader)

    def next(self) -> BatchT:
        return next(self._pass)

    def get_state(self) -> dict[str, Any]:
        return {"loader": self._loader.state_dict(), "pass_epoch": self._epoch}
