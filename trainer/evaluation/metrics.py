"""Check and sum the results of an evaluation's function, and compute the metrics from them."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from ..errors import TrainerConfigError

MetricFunction = Callable[[nn.Module, Any], Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]]
"""(model, batch) -> by metric, the sum of something over the batch, and the count that divides it; each one number."""

_TAKEN = ("kind", "step", "time", "seconds", "weights")  # by the records that tell of evaluations


class MetricSums:
    """Sums and counts of a rank's batches by metric, added in float64 on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._totals: dict[str, torch.Tensor] = {}

    def add(self, found: Mapping[str, tuple[torch.Tensor | float, torch.Tensor | float]]) -> None:
        """Add what the evaluation's function returned; a NaN over a count of 0 counts as nothing.

        Raises:
            TrainerConfigError: it is no mapping of names to a sum and a count, or has a name that records have already.
        """
        if not isinstance(found, Mapping) or not all(_is_pair(pair) for pair in found.values()):
            raise TrainerConfigError(
                f"the evaluation's function returned {found!r:.200}; it must return a mapping of metric to (sum, count)"
            )
        for name, pair in found.items():
            into = self._totals.get(name)
            if into is None:
                _check_name(name)
                into = self._totals[name] = torch.zeros(2, dtype=torch.float64, device=self._device)
            amount, count = (_as_number(one, name) for one in pair)
            is_mean_of_none = (count == 0) & (amount != amount)  # NaN, as a number or a tensor
            if isinstance(is_mean_of_none, torch.Tensor):
                amount = torch.where(is_mean_of_none, 0.0, amount)
            elif is_mean_of_none:
                amount = 0.0
            into[0] += amount
            into[1] += count

    def average(self, *, is_alone: bool = False) -> dict[str, float]:
        """The metrics over all ranks by name, of which a rank may lack some; a collective, but with ``is_alone``.

        ``is_alone``: this rank has seen all the data, and no other takes part.

        Raises:
            TrainerConfigError: on every rank, if a count is negative or not finite.
        """
        names = sorted(self._totals)
        ranks = dist.get_world_size() if dist.is_initialized() and not is_alone else 1
        if ranks > 1:
            everywhere: list[list[str]] = [[] for _ in range(ranks)]
            dist.all_gather_object(everywhere, names)
            names = sorted(set().union(*everywhere))
        if not names:
            return {}
        nothing = torch.zeros(2, dtype=torch.float64, device=self._device)
        table = torch.stack([self._totals.get(name, nothing) for name in names])
        if ranks > 1:
            dist.all_reduce(table)
        return {name: _mean(name, *pair) for name, pair in zip(names, table.tolist(), strict=True)}


def _mean(name: str, amount: float, count: float) -> float:
    if not 0 <= count < math.inf:
        raise TrainerConfigError(
            f"the evaluation's counts for {name!r} add up to {count:g}; a count must be the number of samples or "
            "tokens in the sum, 0 or more, such as len(losses)"
        )
    return amount / count if count else math.nan


def _is_pair(given: object) -> bool:
    return isinstance(given, tuple) and len(given) == 2


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name:
        raise TrainerConfigError(f"the evaluation's function returned {name!r} as a metric's name; give it some text")
    if name in _TAKEN:
        raise TrainerConfigError(
            f"the evaluation's function returned a metric called {name!r}, which is a field of the records that tell "
            f"of it; call it otherwise, such as 'val/{name}' (the names taken are {', '.join(_TAKEN)})"
        )


def _as_number(given: Any, metric: str) -> torch.Tensor | float:
    """The number as it came, or as a tensor () of a real number."""
    if isinstance(given, np.ndarray | np.generic) and given.dtype.kind in "biuf" and given.size == 1:
        return float(given.reshape(()))  # torch has not all of NumPy's formats
    if isinstance(given, torch.Tensor):
        if given.numel() == 1 and not given.is_complex() and not isinstance(given, DTensor):
            return given.reshape(())
        kind = "a DTensor, a tensor in shards," if isinstance(given, DTensor) else f"a tensor of {given.dtype} and"
        got = f"{kind} of shape {tuple(given.shape)}"
    elif isinstance(given, numbers.Real):
        return float(given)
    elif isinstance(given, np.ndarray) and given.size != 1:
        got = f"an array of {given.dtype} and of shape {given.shape}"
    else:
        got = f"a {type(given).__name__}"
    raise TrainerConfigError(
        f"the evaluation's function returned {got} for {metric!r}; it must return a sum and a count, each one real "
        "number, such as losses.sum() and len(losses)"
    )
