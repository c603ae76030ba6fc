"""Threads that decode, and that the interpreter's exit does not wait for.

concurrent.futures' pool would have all that is queued done before the loader hears of the exit.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any

_Job = tuple[Future[None], Callable[..., None], tuple[Any, ...]]


class DecodeThreads:
    """A fixed number of daemon threads that run what is submitted, in order. Mutable state: the queue."""

    def __init__(self, count: int) -> None:
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"penstock-decode-{number}", daemon=True) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., None], *args: Any) -> Future[None]:
        """Have a function called by one of the threads."""
        future: Future[None] = Future()
        self._jobs.put((future, function, args))
        return future

    def close(self) -> None:
        """Wait until all that was submitted is done, or cancelled, and end the threads."""
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, function, args = job
            if future.set_running_or_notify_cancel():
                try:
                    function(*args)
                except BaseException as exc:  # noqa: BLE001 - raised where the result is waited for
                    future.set_exception(exc)
                else:
                    future.set_result(None)
            del job, future, function, args  # the rows must not live on in an idle thread
