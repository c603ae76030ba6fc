"""Stages of about equal times: how long each module takes in a forward, measured on this machine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .cut import list_units, split_evenly

_RUNS = 3


def split_by_time(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any, stages: int) -> list[str]:
    """Names for ``parallel.stages``, such that the slowest of ``stages`` stages takes as short as can be.

    ``batch`` is one microbatch on the device of the whole model, whose forward is run some times; a backward takes
    about twice that of each. Buffers, as of batch norms, have seen the batch. Give all ranks what one has measured.
    """
    return split_evenly(model, stages, measure_units(model, loss, batch))


def measure_units(model: nn.Module, loss: Callable[[nn.Module, Any], Any], batch: Any) -> dict[str, float]:
    """Seconds by name that each module at which a model may be cut takes, the least of some runs."""
    modules = dict(model.named_modules())
    device = next(model.parameters()).device
    clock = _Clock(device)
    handles = [hook for name in list_units(model) for hook in clock.listen(name, modules[name])]
    best: dict[str, float] = {}
    try:
        for number in range(_RUNS + 1):
            clock.seconds = {}
            with torch.no_grad():
                loss(model, batch)
            if number:  # the first one warms up
                best = {name: min(one, best.get(name, one)) for name, one in clock.seconds.items()}
    finally:
        for handle in handles:
            handle.remove()
    return best


class _Clock:
    """Adds up the seconds of units' forwards."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device
        self._began: dict[str, float] = {}

    def listen(self, name: str, module: nn.Module) -> list[Any]:
        def begin(*_: Any) -> None:
            self._began[name] = self._now()

        def end(*_: Any) -> None:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - self._began[name]

        return [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end),
        ]

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()
