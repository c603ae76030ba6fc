"""A recipe whose steps take a given time, by worker; imported by name, as recipes are."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from random import Random

import torch
from torch import Tensor, nn

ROWS, SLOW = 32, 4.0


class Pace:
    """The time that each step takes; it counts the steps. All mutable state: their number."""

    def __init__(self, kind: str, step_s: float) -> None:
        self._kind, self._step_s = kind, step_s
        self._lock = threading.Lock()
        self._draws: dict[str, Random] = {}
        self.steps = 0

    def compute(self) -> None:
        """Take as long as a step of the worker that runs in this thread takes."""
        name = threading.current_thread().name
        draws = self._draws.setdefault(name, Random(name))
        is_slow = name.endswith("-0") if self._kind == "one slow" else draws.random() < 0.25
        time.sleep(self._step_s * (SLOW if is_slow and self._kind != "all alike" else 1.0))
        with self._lock:
            self.steps += 1


NOW: list[Pace] = []
"""The pace of this moment is the last."""


def make_model() -> nn.Module:
    return nn.Linear(16, 1)


def make_batches(count: int) -> list[dict[str, Tensor]]:
    return [{"x": torch.ones(ROWS, 16)}] * count


def compute_loss(model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, int]:
    NOW[-1].compute()
    return model(batch["x"]).sum(), ROWS
