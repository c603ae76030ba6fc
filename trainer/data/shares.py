"""Shares of a global batch by speed: slower ranks get fewer samples, and each global batch stays the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ...storage.errors import PenstockError
from ..computing import ComputeClock
from ..errors import TrainerConfigError
from ..parallel.config import ParallelConfig
from ..ranks.mesh import Mesh
from .batches import count_rows

_SMOOTHING = 0.5
_LEAST_SHARE = 0.1


def check_speed_shares(parallel: ParallelConfig) -> None:
    """Refuse shares by speed where a rank's speed cannot be measured."""
    if parallel.zero:
        raise TrainerConfigError(
            f"shares='auto' measures how long each rank computes, and with parallel.zero={parallel.zero} forward waits "
            "for the slowest rank; use parallel.zero=0, or shares='equal'"
        )


def blend_weights(old: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Compute new weights of mean 1: half the old ones, half in proportion to speed, none below a tenth of the mean.

    Speeds are samples per second of computing. A rank that computed nothing (speed 0) keeps its weight.
    """
    before = np.asarray(old, dtype=np.float64)
    found = np.asarray(speeds, dtype=np.float64)
    seen = found > 0
    if not seen.any():
        return [float(w) for w in before]
    target = before.copy()
    target[seen] = found[seen] / found[seen].sum() * before[seen].sum()
    blended = np.maximum(_SMOOTHING * before + (1 - _SMOOTHING) * target, _LEAST_SHARE)
    return [float(w) for w in blended / blended.mean()]


class SpeedShares:
    """Measures this rank and sets the loader's shares from all replicas' speeds; every rank computes the same weights.

    The ranks of a replica wait for one another, so that one of them speaks for all.

    Raises:
        TrainerConfigError: a loader whose shares cannot be set.
    """

    def __init__(self, loader: Any, mesh: Mesh) -> None:
        if not hasattr(loader, "set_shares"):
            raise TrainerConfigError(
                f"shares='auto' cuts global batches anew and loader={type(loader).__name__} has no "
                "set_shares(weights); use shares='equal', or penstock's loader"
            )
        self._loader = loader
        self._mesh = mesh
        self._world = mesh.world
        self._weights = [1.0] * mesh.replicas
        try:
            loader.set_shares(self._weights)
        except PenstockError as exc:
            raise TrainerConfigError(f"shares='auto' needs set_shares, and the loader refuses: {exc}") from exc
        self._rows: int | torch.Tensor = 0
        self.clock = ComputeClock(mesh.world.device)

    def add(self, microbatches: Iterable[Any]) -> None:
        """Count the rows that this rank has computed in a step."""
        for batch in microbatches:
            self._rows += count_rows(batch)

    def rebalance(self) -> None:
        """Set new shares from the rows and seconds that this rank has computed since the last call; a collective."""
        spent = self.clock.take()
        speeds = torch.zeros(self._mesh.replicas, dtype=torch.float64, device=self._world.device)
        if self._mesh.counts_rows:
            speeds[self._mesh.replica] = float(self._rows) / spent if spent > 0 else 0.0
        if self._world.world_size > 1:
            dist.all_reduce(speeds)
        self._weights = blend_weights(self._weights, speeds.tolist())
        self._loader.set_shares(self._weights)
        self._rows = 0
