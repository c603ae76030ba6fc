"""Times of a rank of a pipeline: how long schedules took, and how much of that it computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Times:
    """Adds up times until they are read; those of a CUDA device by events, which reading waits for.

    Mutable state: the marks of schedules, and of what was computed in them.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._whole: list[tuple[Any, Any]] = []
        self._computed: list[tuple[Any, Any]] = []
        self._began: Any = None

    def begin(self) -> None:
        """Begin a schedule."""
        self._began = self._mark()

    def end(self) -> None:
        """End the schedule that was begun."""
        self._whole.append((self._began, self._mark()))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count what is computed within."""
        began = self._mark()
        yield
        self._computed.append((began, self._mark()))

    def take_idle_share(self) -> float | None:
        """The share of the time since the last call in which nothing was computed; None where there was no schedule."""
        whole, computed = (sum(map(self._seconds, spans)) for spans in (self._whole, self._computed))
        self._whole, self._computed = [], []
        return 1.0 - computed / whole if whole else None

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, span: tuple[Any, Any]) -> float:
        began, ended = span
        if not self._on_cuda:
            return float(ended - began)
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3
