"""A progress bar that appears only on a terminal, and only for work that takes longer than two seconds."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..storage.threads.interruptible import Event, Thread

PATIENCE_S = 2.0

Advance = Callable[[int], None]


@contextmanager
def show_progress(label: str, total: int | None, *, unit: str, enabled: bool = True) -> Iterator[Advance]:
    """Yield a function to call, from any thread, with the number of units done since; the bar goes to stderr.

    Draws nothing if stderr is not a terminal or this process is not the first of its node. ``unit="B"`` shows bytes.
    """
    watched = enabled and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"
    if not watched:
        yield lambda count: None
        return
    bar = _Bar(label, total, unit)
    try:
        yield bar.advance
    finally:
        bar.close()


class _Bar:
    """Owns one thread and one live display; the lock guards ``_display`` and ``_done``."""

    def __init__(self, label: str, total: int | None, unit: str) -> None:
        self._label, self._total, self._unit = label, total, unit
        self._lock = threading.Lock()
        self._done = 0
        self._display: Any = None
        self._task: Any = None
        self._closing = Event()
        self._thread = Thread(target=self._wait, name="penstock-progress")
        self._thread.start()

    def advance(self, count: int) -> None:
        with self._lock:
            self._done += count
            if self._display is not None:
                self._display.advance(self._task, count)

    def _wait(self) -> None:
        if not self._closing.wait(PATIENCE_S):
            self._appear()

    def _appear(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        if self._unit == "B":
            amount: tuple[Any, ...] = (DownloadColumn(binary_units=True),)
        else:
            amount = (MofNCompleteColumn(), TextColumn(self._unit))
        left = (TextColumn("{task.percentage:.0f}%" if self._total else ""), TimeRemainingColumn(compact=True))
        display = Progress(
            TextColumn("{task.description}"),
            # What the other columns leave of the line: a bar of fixed width would be cut on a terminal of 80 columns.
            BarColumn(bar_width=None),
            *amount,
            *left,
            console=Console(stderr=True),
            transient=True,
            expand=True,
        )
        with self._lock:
            self._task = display.add_task(self._label, total=self._total, completed=self._done)
            self._display = display
            display.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        with self._lock:
            if self._display is not None:
                self._display.stop()
                self._display = None
