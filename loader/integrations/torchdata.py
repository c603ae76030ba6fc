"""torchdata: the loader as the source of a graph of ``torchdata.nodes``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..data_loader import DistributedDataLoader
from ..decoding.batch import BatchT

try:
    from torchdata.nodes import BaseNode
except ImportError as exc:
    raise ImportError("LoaderNode needs torchdata; install penstock[integrations]") from exc


class LoaderNode(BaseNode[BatchT]):  # type: ignore[misc]
    """The batches of a loader as a ``torchdata.nodes`` source; ``torchdata.nodes.Loader`` makes passes over it.

    Its state is the loader's, so a graph over it resumes exactly. Nodes above it may work in threads (``Prefetcher``,
    ``ParallelMapper`` with ``method="thread"``). What such nodes hold of their own belongs to a rank and a graph: their
    states must be loaded into the same graph.
    """

    def __init__(self, loader: DistributedDataLoader[BatchT]) -> None:
        super().__init__()
        self._loader = loader
        self._pass: Iterator[BatchT] = iter(())

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Begin a pass: at a state, else at an epoch's beginning."""
        super().reset(initial_state)
        if initial_state is not None:
            self._loader.load_state_dict(initial_state)
        self._pass = iter(self._loader)

    def next(self) -> BatchT:
        return next(self._pass)

    def get_state(self) -> dict[str, Any]:
        return self._loader.state_dict()
