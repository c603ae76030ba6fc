"""A call that is made once: by a thread of a pool, or by whoever waits for it before one has begun."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar

from ....storage.threads.interruptible import Future

if TYPE_CHECKING:
    from ....storage.threads.daemon_pool import DaemonPool

T = TypeVar("T")


class Call(Future[T]):
    """What comes of the call. Any thread may ask. Mutable state: the function, until somebody takes it on."""

    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__()
        self._not_begun = [function]
        self._is_submitted = False

    def begin(self, pool: DaemonPool) -> None:
        """Have a thread of the pool make it soon; nothing, where that was asked before. Called by one thread."""
        if not self._is_submitted:
            self._is_submitted = True
            # PoolClosedError: whoever waits is told by ``cancel``. Else no thread can be had, and he makes it.
            with suppress(RuntimeError):
                pool.submit(self._make_once)

    def result(self, timeout: float | None = None) -> T:
        """Wait for it, or make it where nobody has begun. Raises what it raised, or CancelledError."""
        self._make_once()
        return super().result(timeout)

    def cancel(self) -> bool:
        """Make it no more; False where somebody has begun."""
        if self.take() is None:
            return self.cancelled()
        super().cancel()
        self.set_running_or_notify_cancel()  # so that those who wait for several hear of it
        return True

    def take(self) -> Callable[[], T] | None:
        """The function, for the first who asks: nobody else begins it then, and he is to ``make`` what comes of it."""
        try:
            return self._not_begun.pop()
        except IndexError:
            return None

    def _make_once(self) -> None:
        function = self.take()
        if function is not None:
            self.make(function)

    def make(self, function: Callable[[], T]) -> None:
        """Have what comes of ``function`` be its result; called by who took it. An interrupt is raised, too."""
        try:
            result = function()
        except BaseException as exc:
            self.set_exception(exc)
            if not isinstance(exc, Exception):  # else who makes the call of another would not be stopped
                raise
        else:
            self.set_result(result)
