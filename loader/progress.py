"""A progress bar that appears only on a terminal, and only for work that takes longer than two seconds."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..storage.threads.interruptible import Event, Thread

PATIENCE_S = 2.0
_REFRESH_S = 0.1

Advance = Callable[[int], None]


@contextmanager
def show_progress(label: str, total: int | None, *, unit: str, enabled: bool = True) -> Iterator[Advance]:
    """Yield a function to call, from any thread, with the number of units done since; the bar goes to stderr.

    Draws nothing if stderr is not a terminal or this process is not the first of its node. ``unit="B"`` shows bytes.
    """
    if not (enabled and sys.stderr.isatty() and os.environ.get("LOCAL_RANK", "0") == "0"):
        yield lambda count: None
        return
    done, lock, closing = 0, threading.Lock(), Event()

    def advance(count: int) -> None:
        nonlocal done
        with lock:
            done += count

    thread = Thread(target=_draw, args=(label, total, unit, lambda: done, closing), name="penstock-progress")
    thread.start()
    try:
        yield advance
    finally:
        closing.set()
        thread.join()


def _draw(label: str, total: int | None, unit: str, count: Callable[[], int], closing: Event) -> None:
    """Draw the bar from ``PATIENCE_S`` on until ``closing`` is set; most work ends before rich is imported."""
    if closing.wait(PATIENCE_S):
        return
    from rich import progress as parts
    from rich.console import Console

    amount = (parts.MofNCompleteColumn(), parts.TextColumn(unit))
    columns = (
        parts.TextColumn("{task.description}"),
        parts.BarColumn(bar_width=None),  # what the others leave of the line; a fixed width would be cut
        *((parts.DownloadColumn(binary_units=True),) if unit == "B" else amount),
        parts.TextColumn("{task.percentage:.0f}%" if total else ""),
        parts.TimeRemainingColumn(compact=True),
    )
    is_watched = sys.stdout.isatty()  # what goes into a file or a pipe is not drawn around
    with parts.Progress(
        *columns, console=Console(stderr=True), transient=True, expand=True, auto_refresh=False,
        redirect_stdout=is_watched,
    ) as display:  # fmt: skip
        task = display.add_task(label, total=total, completed=count())
        while not closing.wait(_REFRESH_S):
            display.update(task, completed=count(), refresh=True)
