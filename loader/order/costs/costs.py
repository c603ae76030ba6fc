"""Costs of samples: the numbers of an index by sample id, and a model of the work that they stand for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ...errors import ConfigError
from ..cached import cached_property
from ..permutation import IntArray

CostFunction = Callable[[IntArray], np.ndarray[tuple[int, ...], np.dtype[Any]]]
CostValues = np.ndarray[tuple[int, ...], np.dtype[Any]]

LARGEST = (1 << 32) - 1  # what an index holds at most for a sample
DEFAULT_INDEX = "tokens"
_FINENESS = 1024  # costs of a function that returns floats are rounded to 1 / 1024
_MOST_COST = 1 << 53
_TRIED = 64  # costs that a function is tried with, all at once and one by one


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Cost of a sample, from an index that ``penstock index --cost`` wrote beside the manifest.

    ``index`` is the name of the index, n what it says of a sample. ``model`` says what n costs: "linear" is n;
    "quadratic" is n + n² / (6 · ``hidden_size``), the work of a transformer's layers on a sequence of n tokens with
    full attention, up to a factor (a layer takes 24·n·h² + 4·n²·h: Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters", 2021); a function maps an int64 array of n to an array of costs, each by itself:
    no cost may depend on the others. Floats that it returns are rounded to 1/1024.

    Raises:
        ConfigError: there is no such model, or a setting that it has no use for.
    """

    index: str = DEFAULT_INDEX
    model: Literal["linear", "quadratic"] | CostFunction = "linear"
    hidden_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.index, str) or not self.index:
            raise ConfigError(f"index={self.index!r}: give the name of an index of costs, such as 'tokens'")
        if not callable(self.model) and self.model not in ("linear", "quadratic"):
            raise ConfigError(f"model={self.model!r}: must be 'linear', 'quadratic' or a function of an array of costs")
        size = self.hidden_size
        if self.model != "quadratic" and size is not None:
            raise ConfigError(f"hidden_size={size} with model={self.model!r}: only the quadratic model has one")
        if self.model == "quadratic" and size is None:
            raise ConfigError("model='quadratic' needs hidden_size=, the width of the transformer, such as 4096")
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise ConfigError(f"hidden_size={size!r}: must be a whole number of at least 1")

    @staticmethod
    def read(given: str | Cost) -> Cost:
        """A name of an index as the linear cost of that index. Raises ConfigError for anything else but a Cost."""
        if isinstance(given, Cost):
            return given
        if not isinstance(given, str):
            raise ConfigError(f"cost={given!r}: give the name of an index of costs, such as 'tokens', or a Cost")
        if given == "quadratic":
            raise ConfigError("cost='quadratic': write Cost(model='quadratic', hidden_size=4096), the model's width")
        return Cost(index=given)


@dataclass(frozen=True, eq=False)
class SampleCosts:
    """The costs of all samples: ``values`` (samples,) uint16 or uint32, by sample id, and the ``cost`` made of them.

    ``digest`` identifies the values in states. Safe to share: nothing changes.
    """

    values: CostValues
    digest: str
    cost: Cost = Cost()

    def numbers(self, ids: IntArray) -> IntArray:
        """Look up samples in the index: (n,) int64."""
        return self.values[ids].astype(np.int64)

    def of(self, ids: IntArray) -> IntArray:
        """Costs of samples, up to a factor: (n,) int64, at least 0.

        Raises:
            ConfigError: the user's function returned something else than one cost a sample.
        """
        return self.apply(self.numbers(ids))

    @cached_property
    def largest(self) -> int:
        """The largest number of the index."""
        return int(self.values.max())

    def check_function(self) -> None:
        """Raise ConfigError if the user's function does not cost each sample by itself; some numbers are tried."""
        if not callable(self.cost.model):
            return
        tried = np.unique(self.values[:: max(1, len(self.values) // _TRIED)]).astype(np.int64)
        together = self.apply(tried)
        apart = np.concatenate([self.apply(tried[place : place + 1]) for place in range(len(tried))])
        if not np.array_equal(together, apart):
            raise ConfigError(
                f"model={_name(self.cost.model)}: the cost of a sample changes with the other samples in the array; "
                "compute each from its own number alone"
            )

    def apply(self, numbers: IntArray) -> IntArray:
        """Costs of samples whose entries in the index are ``numbers``, (n,) each. Raises ConfigError as ``of`` does."""
        model = self.cost.model
        if model == "linear":
            return numbers
        if model == "quadratic":
            wide = numbers.astype(np.uint64)
            wide *= wide
            wide //= np.uint64(6 * (self.cost.hidden_size or 1))
            return numbers + wide.astype(np.int64)
        assert callable(model)
        return _whole(model, np.asarray(model(numbers.copy())), len(numbers))


def _whole(model: CostFunction, found: np.ndarray[Any, Any], count: int) -> IntArray:
    """A function's result as whole numbers. Raises ConfigError where it is none."""
    if found.shape != (count,) or found.dtype.kind not in "iuf":
        raise ConfigError(
            f"model={_name(model)}: returned {found.dtype} of shape {found.shape} for {count} samples; return one "
            f"number a sample, ({count},)"
        )
    fine = found * _FINENESS if found.dtype.kind == "f" else found
    bad = np.flatnonzero(~((fine >= 0) & (fine < _MOST_COST)))
    if len(bad):
        raise ConfigError(f"model={_name(model)}: returned the cost {found[bad[0]]}; costs are from 0 to 2**43")
    whole: IntArray = np.rint(fine).astype(np.int64)
    return whole


def _name(model: object) -> str:
    return getattr(model, "__qualname__", repr(model))


def narrow_type(largest: int) -> np.dtype[Any]:
    """The type that an index with this largest number has."""
    return np.dtype(np.uint16 if largest <= np.iinfo(np.uint16).max else np.uint32)


def spread(parts: IntArray) -> float:
    """Ratio of the costliest part to the mean: 1.0 if all are equal, or cost nothing."""
    mean = float(parts.mean())
    return float(parts.max()) / mean if mean and math.isfinite(mean) else 1.0
