"""Processes that decode images where a rank has many cores, with the same results as its threads.

A codec works without the GIL, but between its calls a thread needs it, and gets it only once another thread has been
woken up and has let go of it. On a few cores these waits are little. Sixteen threads on 16 cores decode less than half
of what as many processes do, and each operation that a training loop starts waits with them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError
from functools import partial

from ....storage.threads.interruptible import Future, Thread
from ..row_work import RowError, RowResults, RowTask, RowWork
from .pool import WorkerPool

logger = logging.getLogger(__name__)

_LONGEST_START_S = 120.0
_BEGIN_AFTER = 1000  # images: whoever reads only some does without


class ImageProcesses:
    """Takes the images of batches over from the threads, once these have decoded some and the processes are there.

    Nobody has asked for them, so nothing fails because of them: where they cannot be started, or one ends, the threads
    go on, also with what it was working on, and a warning is logged. Any thread may call any method. Mutable state: the
    images so far and the seconds that processes worked, the pool, the thread that starts it, and whether it has failed
    or is closed, under a lock.
    """

    def __init__(self, work: RowWork, processes: int) -> None:
        self.pool = WorkerPool(work, None, processes, cure="give processes=0, or smaller batches")
        self.busy_s = 0.0
        self._images = 0
        self._starting: Thread | None = None
        self._has_failed = self._is_closed = False
        self._lock = threading.Lock()

    def takes(self, task: RowTask, work: RowWork) -> bool:
        """Return whether the processes are to do ``work`` on ``task``; else the threads are."""
        decoders = task.encoded.values()
        is_ours = all(getattr(one, "is_own", False) for one in decoders) and any(one.is_image for one in decoders)
        if not is_ours or work.transform is not None or self._has_failed:
            return False
        if self.pool.is_ready:
            return True
        with self._lock:
            self._images += len(task.ids)
            if self._images > _BEGIN_AFTER and self._starting is None and not self._is_closed:
                self._starting = self._start(self._begin, "penstock-start-workers")
        return False

    def submit(
        self,
        task: RowTask,
        place: Callable[[RowResults, float], None],
        is_stopped: Callable[[], bool],
        by_threads: Callable[[], futures.Future[None]],
    ) -> Future[None]:
        """Submit a task as to ``WorkerPool``; if a process ends, the work that ``by_threads`` starts replaces it."""

        def place_and_count(results: RowResults, busy_s: float) -> None:
            place(results, busy_s)
            with self._lock:
                self.busy_s += busy_s

        done: Future[None] = Future()
        found = self.pool.submit(task, place_and_count, is_stopped)
        done.add_done_callback(lambda ended: found.cancel() if ended.cancelled() else None)
        found.add_done_callback(partial(self._settle, done, by_threads))
        return done

    @property
    def running(self) -> int:
        """The number of processes that decode; 0 where the threads do."""
        return self.pool.processes if self.pool.is_ready and not self._has_failed else 0

    def _begin(self) -> None:
        try:
            self.pool.start()
            self.pool.wait_until_ready(_LONGEST_START_S)
        except Exception as exc:  # noqa: BLE001 - threads do the same work
            self._give_up(exc)

    def _settle(
        self, done: Future[None], by_threads: Callable[[], futures.Future[None]], found: futures.Future[None]
    ) -> None:
        error = None if found.cancelled() else found.exception()
        is_of_pool = error is not None and not isinstance(error, RowError)
        if error is not None and is_of_pool:
            self._give_up(error)
        if is_of_pool and not self._is_closed:  # a thread meets any error again that is not the pool's
            try:
                by_threads().add_done_callback(partial(_pass_on, done))
            except Exception as exc:  # noqa: BLE001 - raised where the batch is waited for
                _end(done, exc)
        else:
            _pass_on(done, found)

    def _give_up(self, cause: BaseException) -> None:
        """Leave the images to the threads from now on."""
        with self._lock:
            is_first, self._has_failed = not self._has_failed, True
        if is_first and not self._is_closed:
            logger.warning("threads decode the images, because worker processes cannot: %s", cause)
            self._start(self.pool.close, "penstock-end-workers")

    def _start(self, target: Callable[[], None], name: str) -> Thread | None:
        thread = Thread(target=target, name=name)
        try:
            thread.start()
        except RuntimeError as exc:  # there is no room for another thread
            self._has_failed = True
            logger.warning("threads decode the images, because worker processes cannot: %s", exc)
            return None
        return thread

    def let_go(self) -> None:
        """In a forked child: leave the processes to the parent."""
        self.pool.let_go()

    def close(self) -> None:
        """End the processes at once, whatever they are doing."""
        with self._lock:
            self._is_closed, starting = True, self._starting
        self.pool.close()
        if starting is not None and starting is not threading.current_thread():
            starting.join()


def _pass_on(done: Future[None], found: futures.Future[None]) -> None:
    _end(done, CancelledError() if found.cancelled() else found.exception())


def _end(done: Future[None], error: BaseException | None) -> None:
    if done.set_running_or_notify_cancel():
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
