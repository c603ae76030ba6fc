"""Samples of the subset that a run's delivery logs name: read from their headers, or counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..loader.columns import IntArray
from ..loader.errors import ConfigError, DatasetError
from ..loader.order.selecting import Subset, blocks

BoolArray = np.ndarray[tuple[int, ...], np.dtype[np.bool_]]

_MOST_COUNTED = 1 << 26  # samples, of logs that do not tell: a few seconds
_RANGE = 1 << 64
_LIKELY = 12  # standard deviations


@dataclass(frozen=True, slots=True)
class Members:
    """Of a data set of ``total`` samples, the ``count`` that a loader delivers: all, or those of ``subset``."""

    total: int
    count: int
    subset: Subset | None = None
    bounds: tuple[int, int] = (0, _RANGE - 1)

    def holds(self, ids: IntArray) -> BoolArray:
        """Mark the ids that belong to the subset, (n,) bool; takes O(ids) time, whatever the size of the data set."""
        return np.ones(len(ids), np.bool_) if self.subset is None else self.subset.holds_ids(ids, self.bounds)


def read_members(header: Mapping[str, Any]) -> Members:
    """The samples that a log's header tells of.

    Raises:
        DatasetError: it contradicts itself, or tells of so large a subset without its size that counting takes minutes.
    """
    total, subset_fields = int(header["num_samples"]), header.get("subset")
    if subset_fields is None:
        return Members(total, total)
    try:
        subset = Subset(**subset_fields)
        if "members" not in header:
            return _counted(subset, total)
        count, low, high = header["members"]
        members = Members(total, count, subset, (low, high))
        if any(type(number) is not int for number in (count, low, high)) or not _is_possible(members, subset):
            raise ConfigError(f"it is said to have {count} of {total:,} samples, with numbers from {low} to {high}")
        return members
    except (TypeError, ValueError, ConfigError) as exc:
        raise DatasetError(f"the subset in the logs' headers is damaged: {exc}") from exc


def _counted(subset: Subset, total: int) -> Members:
    if total > _MOST_COUNTED:
        raise DatasetError(
            f"the logs' headers tell of a subset of {total:,} samples, and not how many it has, as older logs and "
            f"damaged ones do; up to {_MOST_COUNTED:,} samples they are counted"
        )
    bounds = subset.bounds(total)
    count = sum(int(np.count_nonzero(subset.holds(start, stop, bounds))) for start, stop in blocks(total))
    return Members(total, count, subset, bounds)


def _is_possible(members: Members, subset: Subset) -> bool:
    """Return whether a subset can have this many samples with random numbers in this range."""
    (low, high), count, total = members.bounds, members.count, members.total
    if not 0 < count <= total or not 0 <= low <= high < _RANGE:
        return False
    if subset.unit == "share":
        fits = (low, high) == subset.bounds(total)
    else:
        fits = count == (total if subset.stop is None else int(subset.stop)) - int(subset.start)
    share = (high - low + 1) / _RANGE
    return fits and abs(count - share * total) <= _LIKELY * (1 + math.sqrt(total * share * (1 - share)))
