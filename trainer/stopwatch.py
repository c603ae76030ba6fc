"""Where the time goes: seconds in each phase of the loop, by this rank's host clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType


class Stopwatch:
    """Adds up seconds by phase; ``entered`` is called with the name of each phase as it begins. One thread uses it."""

    def __init__(self, entered: Callable[[str], None] | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self.entered = entered
        self._phases: dict[str, _Phase] = {}
        self._started = time.perf_counter()

    def phase(self, name: str) -> _Phase:
        """A context for one phase; phases do not nest."""
        found = self._phases.get(name)
        if found is None:
            found = self._phases[name] = _Phase(self, name)
        return found

    def enter(self, name: str) -> None:
        if self.entered is not None:
            self.entered(name)

    @property
    def total_s(self) -> float:
        return time.perf_counter() - self._started


class _Phase:
    __slots__ = ("_name", "_since", "_stopwatch")

    def __init__(self, stopwatch: Stopwatch, name: str) -> None:
        self._stopwatch = stopwatch
        self._name = name
        self._since = 0.0

    def __enter__(self) -> None:
        self._stopwatch.enter(self._name)
        self._since = time.perf_counter()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        seconds = self._stopwatch.seconds
        seconds[self._name] = seconds.get(self._name, 0.0) + time.perf_counter() - self._since
