"""A call made once: by a thread of a pool, or by the thread that waits for it first."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from ....storage.threads.interruptible import Future

if TYPE_CHECKING:
    from ....storage.threads.daemon_pool import DaemonPool

T = TypeVar("T")


class Call(Future[T]):
    """A call and its result. Any thread may ask. Mutable state: the function, until a thread takes it."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._not_begun = [function]
        self._is_submitted = False

    def begin(self, pool: DaemonPool) -> None:
        """Have a thread of the pool make it soon; does nothing if asked before. Called by one thread."""
        if not self._is_submitted:
            self._is_submitted = True
            # PoolClosedError: ``cancel`` wakes the waiting thread; if no thread can start, the waiting one makes it.
            with suppress(RuntimeError):
                pool.submit(self._make_once)

    def result(self, timeout: float | None = None) -> T:
        """Wait for the result, or make it if no thread has begun. Raises the call's error, or CancelledError."""
        self._make_once()
        return super().result(timeout)

    def cancel(self) -> bool:
        """Cancel the call; returns False if a thread has begun it."""
        if self.take() is None:
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()  # so that those who wait for several hear of it
        return True

    def take(self) -> Callable[[], T] | None:
        """Take the function: only the first caller gets it, and must ``make`` its result."""
        try:
            return self._not_begun.pop()
        except IndexError:
            return None

    def _make_once(self) -> None:
        function = self.take()
        if function is not None:
            self.make(function)

    def make(self, function: Callable[[], T]) -> None:
        """Run ``function`` and keep its result; called by the thread that took it. Also raises an interrupt."""
        try:
            result = function()
        except BaseException as exc:
            self.set_exception(exc)
            if not isinstance(exc, Exception):  # else who makes the call of another would not be stopped
                raise
        else:
            self.set_result(result)
