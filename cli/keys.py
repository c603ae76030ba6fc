"""Keys that are pressed while a view is on the terminal, and a terminal that is left as it was found."""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from types import FrameType, TracebackType
from typing import Any, Self

try:
    import termios
    import tty
except ImportError:  # no Unix
    termios = tty = None  # type: ignore[assignment]

_ENDING = ("SIGTERM", "SIGHUP", "SIGQUIT")
_BY_SIGNAL = 128


class Keys:
    """While this is entered, keys come at once and are not shown; where there is no terminal, none come.

    Signals that end the process become SystemExit, so that leaving restores the terminal, whatever ends the view.
    Used by the main thread. Mutable state: the terminal's settings and the handlers of before.
    """

    def __init__(self) -> None:
        self._fd: int | None = None
        self._before: list[Any] | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (getattr(signal, name) for name in _ENDING if hasattr(signal, name)):
            if signal.getsignal(number) is signal.SIG_DFL:  # not under nohup, say
                self._handlers[number] = signal.signal(number, _end)
        self._fd = _own_terminal()
        if self._fd is not None:
            self._before = termios.tcgetattr(self._fd)
            tty.setcbreak(self._fd, termios.TCSADRAIN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        before, self._before = self._before, None
        if before is not None and self._fd is not None:
            termios.tcsetattr(self._fd, termios.TCSADRAIN, before)
        handlers, self._handlers = self._handlers, {}
        for number, handler in handlers.items():
            signal.signal(number, handler)

    def wait(self, seconds: float) -> str:
        """Keys that are pressed within ``timeout_s`` seconds; empty, after them, if none are."""
        if self._before is None or self._fd is None:
            time.sleep(seconds)
            return ""
        ready, _, _ = select.select([self._fd], [], [], seconds)
        if not ready:
            return ""
        data = os.read(self._fd, 1024)
        if not data:  # the terminal is gone, and would be ready for ever
            self._fd = None
        return data.decode(errors="replace")


def _own_terminal() -> int | None:
    """The terminal that this process may read: none in the background, where reading would stop it."""
    try:
        fd = sys.stdin.fileno()
        return fd if termios is not None and os.isatty(fd) and os.tcgetpgrp(fd) == os.getpgrp() else None
    except (OSError, ValueError, AttributeError):  # there is no standard input, or it is closed
        return None


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(_BY_SIGNAL + number)
