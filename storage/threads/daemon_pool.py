"""Threads that the interpreter's exit does not wait for.

``concurrent.futures`` joins its threads at exit: a slow request or a long queue would hold up a process that is done.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from queue import SimpleQueue
from typing import Any, Self, TypeVar, TypeVarTuple

from .interruptible import Future, Thread

T = TypeVar("T")
Item = TypeVar("Item")
Ts = TypeVarTuple("Ts")

_Job = tuple[Future[Any], Callable[..., Any], tuple[Any, ...]]

_LOOK = object()  # wakes a thread, so that it looks whether it is one too many
_INTERRUPTED_S = 1.0


class PoolClosedError(RuntimeError):
    """A job was submitted to a pool that is closed."""


class DaemonPool:
    """Daemon threads that run jobs in the order in which they were submitted.

    Threads start when jobs need them, and end with the pool's last reference, if it was not closed before. Mutable
    state: the threads and the number of unfinished jobs, under a lock.
    As a context manager it is closed when the block ends; if that is by an error, jobs that have not begun are
    cancelled, and after Ctrl-C those that run are waited for one second only.
    """

    def __init__(self, name: str, max_threads: int | None = None) -> None:
        """``max_threads`` limits how many jobs run at a time; None runs all of them at once."""
        if max_threads is not None and max_threads < 1:
            raise ValueError(f"max_threads={max_threads}: needs 1 or more, or None")
        self._name = name
        self._max_threads = max_threads
        self._closed = False
        self._is_cancelled = False
        self._forget_threads()
        _POOLS.add(self)

    def _forget_threads(self) -> None:
        self._lock = threading.Lock()
        self._jobs: SimpleQueue[Any] = SimpleQueue()  # of jobs, _LOOK, and None, which ends all threads
        self._threads: list[Thread] = []
        self._unfinished = 0
        weakref.finalize(self, self._jobs.put, None).atexit = False

    def submit(self, function: Callable[[*Ts], T], *args: *Ts) -> Future[T]:
        """Call a function in a thread; the future holds what it returns or raises, and can cancel it before it starts.

        Raises:
            PoolClosedError: the pool is closed.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._closed:
                raise PoolClosedError(f"the threads of {self._name} are closed")
            if self._unfinished >= len(self._threads):
                self._start_thread()
            self._unfinished += 1
            self._jobs.put((future, function, args))
        return future

    def _start_thread(self) -> None:
        if self._max_threads is None or len(self._threads) < self._max_threads:
            thread = Thread(target=_work, args=(weakref.ref(self), self._jobs), name=self._name)
            try:
                self._threads.append(thread)  # before it runs: whatever happens, ``close`` knows of it
                thread.start()
            except BaseException:
                if not thread.is_alive():
                    self._threads = [one for one in self._threads if one is not thread]
                raise

    def map(self, function: Callable[[Item], T], items: Iterable[Item]) -> Iterator[T]:
        """Call a function with each item; yields what it returns, in order, and raises what it raises.

        When the iterator ends early, calls that have not begun are cancelled.
        """
        futures = [self.submit(function, item) for item in items]
        try:
            for future in futures:
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    @property
    def max_threads(self) -> int | None:
        """Number of jobs that may run at a time; None for no limit."""
        return self._max_threads

    def limit(self, max_threads: int) -> None:
        """Change the number of jobs that run at a time. Surplus threads end with the job that they run."""
        if max_threads < 1:
            raise ValueError(f"max_threads={max_threads}: needs 1 or more")
        with self._lock:
            if self._closed:
                return
            self._max_threads = max_threads
            for _ in range(len(self._threads) - max_threads):
                self._jobs.put(_LOOK)
            while len(self._threads) < min(max_threads, self._unfinished):
                self._start_thread()

    def close(self, timeout_s: float | None = None, *, cancel: bool = False) -> None:
        """End the threads when the jobs submitted so far are done or cancelled; wait at most ``timeout_s`` in total.

        ``timeout_s=None`` waits as long as the jobs take; with ``cancel`` those that have not begun are cancelled.
        A job may call this; further calls do nothing, but finish a call that an interrupt ended.
        """
        if sys.is_finalizing():  # a generator that closes it ends with the interpreter, when no other thread runs
            return
        with self._lock:
            self._closed = True
            self._is_cancelled |= cancel
            self._jobs.put(None)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in list(self._threads):
            if thread is not threading.current_thread():
                thread.join(None if until is None else max(0.0, until - time.monotonic()))
        self._threads = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc_info: object) -> None:
        is_interrupt = kind is not None and not issubclass(kind, Exception)
        self.close(_INTERRUPTED_S if is_interrupt else None, cancel=kind is not None)

    def _leave(self) -> bool:
        """Remove the calling thread from the pool if there is one too many, and return whether it was removed."""
        with self._lock:
            if self._closed or self._max_threads is None or len(self._threads) <= self._max_threads:
                return False
            self._threads = [thread for thread in self._threads if thread is not threading.current_thread()]
            return True


_POOLS: weakref.WeakSet[DaemonPool] = weakref.WeakSet()


def _work(pool_of: weakref.ref[DaemonPool], jobs: SimpleQueue[Any]) -> None:
    """Run jobs in a thread, without keeping a pool alive that is no longer referenced."""
    while (job := jobs.get()) is not None:
        pool = pool_of()
        if job is not _LOOK:
            future, function, args = job
            if pool is not None and pool._is_cancelled:
                future.cancel()
            del pool
            if future.set_running_or_notify_cancel():
                try:
                    result = function(*args)
                except BaseException as exc:  # noqa: BLE001 - raised where the result is waited for
                    future.set_exception(exc)
                else:
                    future.set_result(result)
                    del result
            del job, future, function, args  # an idle thread must not keep what they refer to alive
            pool = pool_of()
            if pool is not None:
                with pool._lock:
                    pool._unfinished -= 1
        if pool is not None and pool._leave():
            return
        del pool
    jobs.put(None)  # for the next thread


def _forget_threads_in_child() -> None:
    """After a fork the child has none of the threads, and locks that they held would never be released."""
    for pool in list(_POOLS):
        pool._forget_threads()


os.register_at_fork(after_in_child=_forget_threads_in_child)
