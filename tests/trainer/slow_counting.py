"""A loss that takes its time, for runs in which processes are killed; imports nothing of the tests."""

from __future__ import annotations

import time
from collections.abc import Mapping

from torch import Tensor, nn


def count_slowly(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    time.sleep(0.05)
    return model.counts[int(batch["place"])].sum(), 1  # type: ignore[index, union-attr, return-value]


def count_apart_slowly(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    time.sleep(0.05)
    rest = sum(one.sum() for one in model.counts) * 0  # type: ignore[union-attr]
    return model.counts[int(batch["place"])].sum() + rest, 1  # type: ignore[index, operator, return-value]
