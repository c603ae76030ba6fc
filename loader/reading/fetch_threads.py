"""The threads that fetch chunks: as many as are wanted at the moment, and how busy they are."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from ...storage.threads.interruptible import Thread


class FetchThreads:
    """Daemon threads that all run ``loop``. Every method but ``start`` and ``join`` is called under the owner's lock.

    A thread of ``loop`` asks ``leaves`` between two chunks, and returns if it does.
    """

    def __init__(self, loop: Callable[[], None], wanted: int) -> None:
        self._loop = loop
        self.wanted = wanted
        self._threads: list[Thread] = []
        self._is_started = False
        self._busy = 0
        self._busy_s = 0.0  # summed over the threads, until _counted_until
        self._counted_until = 0.0

    def start(self) -> None:
        self._is_started = True
        self.resize(self.wanted)

    def resize(self, wanted: int) -> None:
        """Set the number of threads, at once if they run; surplus threads end after their current work.

        Raises:
            RuntimeError: no more threads can be started.
        """
        self.wanted = wanted
        while self._is_started and len(self._threads) < wanted:
            name = f"penstock-fetch-{len(self._threads)}"
            thread = Thread(target=self._loop, name=name)
            self._threads.append(thread)  # before it runs, so that it finds itself here
            try:
                thread.start()
            except RuntimeError:  # the machine gives no more
                self._threads.remove(thread)
                self.wanted = max(1, len(self._threads))
                raise

    def leaves(self) -> bool:
        """Return whether the calling thread is one too many; it is then removed from the pool."""
        current = threading.current_thread()
        if current in self._threads and len(self._threads) > self.wanted:
            self._threads.remove(current)
        return current not in self._threads

    def stop(self) -> None:
        """Start no more threads."""
        self._is_started = False

    def join(self, until: float) -> None:
        """Wait for the threads until ``time.monotonic()`` reaches ``until``."""
        for thread in list(self._threads):
            if thread.is_alive():
                thread.join(max(0.0, until - time.monotonic()))

    def note(self, change: int) -> None:
        """Record that ``change`` more threads fetch now."""
        now = time.perf_counter()
        self._busy_s += self._busy * (now - self._counted_until)
        self._counted_until = now
        self._busy += change

    def busy_s(self) -> float:
        """Seconds so far that threads fetched and opened chunks, summed over them."""
        self.note(0)
        return self._busy_s
