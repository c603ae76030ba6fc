"""Processes that decode images where a rank has many cores, with the same results as its threads.

A codec works without the GIL, but between its calls a thread needs it, and gets it only once another thread has been
woken up and has let go of it. On a few cores these waits are little. Sixteen threads on 16 cores decode less than eight
do, and each operation that a training loop starts waits with them.
"""

from __future__ import annotations

import logging
import threading

from ....storage.threads.interruptible import Thread
from ...limits import usable_memory
from ...ranks.detect import local_world_size
from ..row_work import RowTask, RowWork
from .pool import WorkerPool

logger = logging.getLogger(__name__)

_LEAST_CORES = 6
_SPARED_CORES = 2  # for the training loop, and for the threads that fetch and copy
_MOST = 32
_BYTES = 40 << 20  # of a process, beside what they share
_MEMORY_SHARE = 0.05
_LONGEST_START_S = 120.0
_BEGIN_AFTER = 1000  # images: whoever reads only some does without


def count_image_processes(cores: int) -> int:
    """How many processes are to decode a rank's images, of so many cores; 0 where its threads are to."""
    if cores < _LEAST_CORES:
        return 0
    in_memory = int(_MEMORY_SHARE * usable_memory() / local_world_size() / _BYTES)
    return min(cores - _SPARED_CORES, _MOST, in_memory)


class ImageProcesses:
    """Takes the images of batches over from the threads, once these have decoded some and the processes are there.

    Where they cannot be started, the threads go on, and a warning is logged. Any thread may call any method. Mutable
    state: the images so far, and the pool, under a lock.
    """

    def __init__(self, work: RowWork, processes: int) -> None:
        self.pool = WorkerPool(work, None, processes)
        self._images = 0
        self._has_begun = False
        self._is_closed = False
        self._lock = threading.Lock()

    def take(self, task: RowTask) -> WorkerPool | None:
        """The pool that is to work on ``task``; None where the threads are to."""
        decoders = task.encoded.values()
        if not any(one.is_image for one in decoders) or not all(getattr(one, "is_own", False) for one in decoders):
            return None
        if self.pool.is_ready:
            return self.pool
        with self._lock:
            self._images += len(task.ids)
            begins = self._images > _BEGIN_AFTER and not self._has_begun and not self._is_closed
            self._has_begun |= begins
        if begins:
            Thread(target=self._begin, name="penstock-start-workers").start()
        return None

    @property
    def running(self) -> int:
        """How many processes decode; 0 where the threads do."""
        return self.pool.processes if self.pool.is_ready else 0

    def _begin(self) -> None:
        try:
            self.pool.start()
            self.pool.wait_until_ready(_LONGEST_START_S)
        except Exception as exc:  # noqa: BLE001 - threads do the same work
            if not self._is_closed:
                logger.warning("images go on being decoded by threads, not by processes: %s", exc)
            self.pool.close()

    def let_go(self) -> None:
        """In a forked child: leave the processes to the parent."""
        self.pool.let_go()

    def close(self) -> None:
        """End the processes at once, whatever they are doing."""
        self._is_closed = True
        self.pool.close()
