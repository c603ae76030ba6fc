"""Stopwatch of the loop: seconds in each phase, by this rank's host clock and by its device's."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from ..storage.observability.timeline import Timeline

# What the host only starts on a CUDA device, so that its clock does not see how long it takes.
_ON_DEVICE = ("forward", "backward", "optimizer")
_KEPT_SPANS = 256
_GLANCES = 4  # in which no phase may have begun or ended


class Stopwatch:
    """Adds up seconds by phase; ``entered`` is called with the name of each phase as it begins.

    One thread uses it; others may ``glance`` at it, and read what is ``current``.
    """

    def __init__(self, clock: DeviceClock | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.entered: Callable[[str], None] | None = None
        self.clock = clock
        self.timeline: Timeline | None = None
        """Timeline to record phases on; None while nobody records."""
        self.current = ("construction", time.perf_counter())
        """The phase that began last, and when."""
        self._running: tuple[str, float] | None = None  # a phase that has not ended, and since when
        self._phases: dict[str, _Phase] = {}
        self._started = time.perf_counter()

    def phase(self, name: str) -> _Phase:
        """A context for one phase; phases do not nest."""
        found = self._phases.get(name)
        if found is None:
            timed = self.clock is not None and name in _ON_DEVICE
            found = self._phases[name] = _Phase(self, name, self.clock if timed else None)
        return found

    def enter(self, name: str) -> None:
        self.current = (name, time.perf_counter())
        if self.entered is not None:
            self.entered(name)

    def begin(self, name: str) -> float:
        """Enter a phase that is timed; returns since when, by ``time.perf_counter()``."""
        self.enter(name)
        since_s = time.perf_counter()
        self._running = (name, since_s)
        return since_s

    def end(self, name: str, seconds: float) -> None:
        self._running = None  # first, so that nobody who glances counts it twice
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds

    def read(self) -> dict[str, float]:
        """Seconds by phase so far: the device's own for what runs on it, as far as it has come, else the host's."""
        return self.seconds if self.clock is None else {**self.seconds, **self.clock.read()}

    def glance(self) -> dict[str, float]:
        """Preview the result of ``read`` as of now, without resetting anything; for any thread.

        The running phase counts up to now, unless a device times it.
        """
        for _ in range(_GLANCES):
            running, found = self._running, dict(self.seconds)
            if running is self._running:  # it has not ended meanwhile: its seconds are not among those found
                break
            running = None
        if running is not None:
            name, since_s = running
            found[name] = found.get(name, 0.0) + time.perf_counter() - since_s
        return {**found, **({} if self.clock is None else self.clock.seconds)}

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._started


class DeviceClock:
    """Adds up how long a CUDA device works on each phase, by events that are read when they have come; never waits."""

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        self.seconds: dict[str, float] = {}
        self._spans: deque[tuple[str, Any, Any]] = deque()
        self._free: list[Any] = []

    def mark(self) -> Any:
        """An event at this point of the device's work."""
        event = self._free.pop() if self._free else self._make_event()
        event.record()
        return event

    def add(self, name: str, begin: Any) -> None:
        """Count what the device does from ``begin`` to this point for a phase."""
        self._spans.append((name, begin, self.mark()))
        if len(self._spans) > _KEPT_SPANS:
            self.read()

    def read(self) -> dict[str, float]:
        """Seconds by phase, of spans that the device is through with."""
        while self._spans and self._spans[0][2].query():
            name, begin, end = self._spans.popleft()
            self.seconds[name] = self.seconds.get(name, 0.0) + begin.elapsed_time(end) / 1e3
            self._free += (begin, end)
        return dict(self.seconds)


class _Phase:
    __slots__ = ("_begin", "_clock", "_name", "_since", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, name: str, clock: DeviceClock | None) -> None:
        self._stopwatch = stopwatch
        self._name = name
        self._clock = clock
        self._since = 0.0
        self._begin: Any = None

    def __enter__(self) -> None:
        self._since = self._stopwatch.begin(self._name)
        if self._clock is not None:
            self._begin = self._clock.mark()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._clock is not None:
            self._clock.add(self._name, self._begin)
        now_s = time.perf_counter()
        self._stopwatch.end(self._name, now_s - self._since)
        timeline = self._stopwatch.timeline
        if timeline is not None:
            timeline.add(self._name, self._since, now_s)
