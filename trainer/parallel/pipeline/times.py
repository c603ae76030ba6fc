"""Times of a rank of a pipeline: how long schedules took, and how much of that it computed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import takewhile
from typing import Any

import torch

Span = tuple[Any, Any]
"""Marks of begin and end: seconds, or a CUDA device's events."""


class Times:
    """Adds up times until they are read; those of a CUDA device by events, which nothing waits for.

    Mutable state: the marks of schedules, each with those of what was computed in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._schedules: list[tuple[Span, list[Span]]] = []
        self._computed: list[Span] = []
        self._began: Any = None

    def begin(self) -> None:
        """Begin a schedule."""
        self._began, self._computed = self._mark(), []

    def end(self) -> None:
        """End the schedule that was begun."""
        self._schedules.append(((self._began, self._mark()), self._computed))

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Count what is computed within."""
        began = self._mark()
        yield
        self._computed.append((began, self._mark()))

    def take(self) -> tuple[float, float]:
        """Seconds of the schedules since the last call, and of what was computed in them; waits for none to be over."""
        over = list(takewhile(lambda one: self._is_over(one[0]), self._schedules))
        self._schedules = self._schedules[len(over) :]
        computed = sum(self._seconds(span) for _, spans in over for span in spans)
        return sum(self._seconds(whole) for whole, _ in over), computed

    def _is_over(self, span: Span) -> bool:
        return not self._on_cuda or bool(span[1].query())

    def _mark(self) -> Any:
        if not self._on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def _seconds(self, span: Span) -> float:
        began, ended = span
        if not self._on_cuda:
            return float(ended - began)
        return float(began.elapsed_time(ended)) / 1e3
