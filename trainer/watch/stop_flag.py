"""Signals that ask to stop, or to trace, become flags, which the training loop reads once a step.

Each step adds up the ranks' flags in the collective that it runs anyway, so all ranks stop after the same step. A node
that gets SIGTERM thereby stops all nodes with a checkpoint; the processes of the other nodes then exit with a code that
makes torchrun start them again.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Self

from ..errors import TrainerConfigError

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HANGUP = signal.SIGHUP  # as torchrun passes it on when its terminal closes


class StopFlag:
    """Set by the first SIGTERM, SIGINT or SIGHUP that this process gets; a second SIGINT interrupts at once, as usual.

    A SIGHUP that is ignored, as under nohup, or has a handler already is left alone.

    Made and closed in the main thread; ``close`` restores the handlers that were there before. All mutable state: the
    signal that came, and those handlers.

    Raises:
        TrainerConfigError: made in another thread than the main one.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise TrainerConfigError("signals can be caught in the main thread only; start training there")
        self._signal: signal.Signals | None = None
        caught = [*_SIGNALS, *([_HANGUP] if signal.getsignal(_HANGUP) is signal.SIG_DFL else [])]
        self._before = {number: signal.signal(number, self._catch) for number in caught}

    @property
    def reason(self) -> str | None:
        """The name of the signal that this process got, or None."""
        return None if self._signal is None else self._signal.name

    def close(self) -> None:
        """Restore the handlers; closing twice is allowed."""
        before, self._before = self._before, {}
        for number, handler in before.items():
            signal.signal(number, handler)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _catch(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._signal is signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = signal.Signals(number)


class TraceFlag:
    """Flag that each SIGUSR2 to this process sets and ``take`` clears; a handler that is already installed stays.

    Made and closed in the main thread, as ``StopFlag``. Schedulers and launchers that use the signal for themselves
    install their handler before training starts.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._is_installed = signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        if self._is_installed:
            signal.signal(signal.SIGUSR2, self._catch)

    def take(self) -> bool:
        """Return whether the signal came since the last call."""
        found, self._is_set = self._is_set, False
        return found

    def close(self) -> None:
        """Restore the default; closing twice is allowed."""
        if self._is_installed and signal.getsignal(signal.SIGUSR2) == self._catch:
            signal.signal(signal.SIGUSR2, signal.SIG_DFL)
        self._is_installed = False

    def _catch(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True
