"""A signal that asks to stop becomes a flag, which the training loop reads once a step.

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


class StopFlag:
    """Set by the first SIGTERM or SIGINT that this process gets; a second SIGINT interrupts at once, as usual.

    Made and closed in the main thread; ``close`` restores the handlers that were there before. All mutable state: the
    signal that came, and those handlers.

    Raises:
        TrainerConfigError: made in another thread than the main one.
    """

    def __init__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise TrainerConfigError("signals can be caught in the main thread only; start training there")
        self._signal: signal.Signals | None = None
        self._before = {number: signal.signal(number, self._catch) for number in _SIGNALS}

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
