"""Processes that decode images where a rank has many cores, with the same results as its threads.

A codec works without the GIL, but between its calls a thread needs it, and gets it only once another thread has been
woken up and has let go of it. On a few cores these waits are little. Sixteen threads on 16 cores decode less than eight
do, and each operation that a training loop starts waits with them.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import CancelledError
from functools import partial
from pathlib import Path

from ....storage.threads.interruptible import Future, Thread
from ...errors import WorkerError
from ...limits import usable_memory
from ...ranks.detect import local_world_size
from ..row_work import RowResults, RowTask, RowWork
from .pool import WorkerPool

logger = logging.getLogger(__name__)

_LEAST_CORES = 6
_MOST = 32
_BYTES = 40 << 20  # of a process, beside what they share
_MEMORY_SHARE = 0.05
_LONGEST_START_S = 120.0
_BEGIN_AFTER = 1000  # images: whoever reads only some does without


def count_image_processes(cores: int) -> int:
    """How many processes are to decode a rank's images, of so many cores; 0 where its threads are to."""
    is_python = Path(sys.executable or "").name.startswith("python") and not getattr(sys, "frozen", False)
    if cores < _LEAST_CORES or not is_python:  # an application that Python is part of would be started again
        return 0
    in_memory = int(_MEMORY_SHARE * usable_memory() / local_world_size() / _BYTES)
    return min(cores - 1, _MOST, in_memory)  # one is left to the loop, and to threads that fetch and copy


class ImageProcesses:
    """Takes the images of batches over from the threads, once these have decoded some and the processes are there.

    Nobody has asked for them, so nothing fails because of them: where they cannot be started, or one ends, the threads
    go on, also with what it was working on, and a warning is logged. Any thread may call any method. Mutable state: the
    images so far, the pool, and whether it begins, has failed or is closed, under a lock.
    """

    def __init__(self, work: RowWork, processes: int) -> None:
        self.pool = WorkerPool(work, None, processes)
        self._images = 0
        self._has_begun = self._has_failed = self._is_closed = False
        self._lock = threading.Lock()

    def takes(self, task: RowTask) -> bool:
        """Whether the processes are to work on ``task``; else the threads are."""
        decoders = task.encoded.values()
        is_ours = all(getattr(one, "is_own", False) for one in decoders) and any(one.is_image for one in decoders)
        if not is_ours or self._has_failed:
            return False
        if self.pool.is_ready:
            return True
        with self._lock:
            self._images += len(task.ids)
            begins = self._images > _BEGIN_AFTER and not self._has_begun and not self._is_closed
            self._has_begun |= begins
        if begins:
            Thread(target=self._begin, name="penstock-start-workers").start()
        return False

    def submit(
        self,
        task: RowTask,
        place: Callable[[RowResults, float], None],
        is_stopped: Callable[[], bool],
        by_threads: Callable[[], futures.Future[None]],
    ) -> Future[None]:
        """As ``WorkerPool.submit``; where a process ends, what ``by_threads`` starts does the work."""
        done: Future[None] = Future()
        self.pool.submit(task, place, is_stopped).add_done_callback(partial(self._settle, done, by_threads))
        return done

    @property
    def running(self) -> int:
        """How many processes decode; 0 where the threads do."""
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
        if isinstance(error, WorkerError):
            self._give_up(error)
        if isinstance(error, (WorkerError, CancelledError)) and not self._is_closed:
            try:
                by_threads().add_done_callback(partial(_pass_on, done))
            except Exception as exc:  # noqa: BLE001 - told where the batch is waited for
                _end(done, exc)
        else:
            _pass_on(done, found)

    def _give_up(self, cause: BaseException) -> None:
        """Leave it to the threads from now on."""
        with self._lock:
            is_first, self._has_failed = not self._has_failed, True
        if is_first and not self._is_closed:
            logger.warning("images go on being decoded by threads, not by processes: %s", cause)
            Thread(target=self.pool.close, name="penstock-end-workers").start()

    def let_go(self) -> None:
        """In a forked child: leave the processes to the parent."""
        self.pool.let_go()

    def close(self) -> None:
        """End the processes at once, whatever they are doing."""
        self._is_closed = True
        self.pool.close()


def _pass_on(done: Future[None], found: futures.Future[None]) -> None:
    _end(done, CancelledError() if found.cancelled() else found.exception())


def _end(done: Future[None], error: BaseException | None) -> None:
    if done.set_running_or_notify_cancel():
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)
