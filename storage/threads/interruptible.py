"""Conditions, events, futures and threads that Ctrl-C cannot leave locked, or half begun.

``threading.Condition`` takes its lock in a function of Python: if a signal's exception is raised as that function
returns, the lock stays taken, and the next thread waits for ever. Here ``with`` meets the lock itself: between its
taking and the protection of the block the interpreter looks for no signals.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_BEGINNING_S = 1.0  # for a thread to say that it runs, where who started it is interrupted

_RLock: Any = type(threading.RLock())


class Condition(_RLock, threading.Condition):  # type: ignore[misc]
    """Condition as ``threading.Condition()``; a waiter must have taken it once, not twice."""

    def __init__(self) -> None:
        self._waiters: deque[Any] = deque()  # what the methods of threading.Condition work on, beside the lock

    def wait(self, timeout: float | None = None) -> bool:
        """As that of ``threading.Condition``; the lock is taken again, however it ends."""
        if not self._is_owned():
            raise RuntimeError("only the thread that has taken a condition's lock can wait for it")
        waiter, is_notified = threading.Lock(), False
        waiter.acquire()
        taken_once = (1, threading.get_ident())
        self._waiters.append(waiter)
        try:
            self._release_save()
            is_notified = waiter.acquire(timeout=-1 if timeout is None else max(0.0, timeout))
        finally:
            try:
                self._acquire_restore(taken_once)  # which no signal interrupts, but one may come as it returns
            finally:
                if not is_notified:  # else the next ``notify`` would wake no thread
                    with suppress(ValueError):
                        self._waiters.remove(waiter)
        return is_notified


class Event:
    """As ``threading.Event``."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._changed:
            self._is_set = True
            self._changed.notify_all()

    def clear(self) -> None:
        with self._changed:
            self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, at most for ``timeout`` seconds; whether it was."""
        with self._changed:
            return self._is_set or self._changed.wait(timeout)

    def _at_fork_reinit(self) -> None:
        """Called by ``threading`` in a forked child, where another thread may have held the lock."""
        self._changed = Condition()


class Future(futures.Future[T]):
    """As ``concurrent.futures.Future``."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = Condition()


class Thread(threading.Thread):
    """As ``threading.Thread(daemon=True)``.

    That of CPython waits for an event when it is started, whose lock an interrupt could keep from the new thread, and
    takes a thread for ended, up to version 3.12, when ``join`` or ``is_alive`` is interrupted.
    """

    _started: Any

    def __init__(self, *, target: Callable[..., object], name: str, args: tuple[Any, ...] = ()) -> None:
        super().__init__(target=target, args=args, name=name, daemon=True)
        self._started = Event()
        self._ended = Event()
        self._process = os.getpid()

    def start(self) -> None:
        """As that of ``threading.Thread``; after an interrupt, too, ``is_alive`` says whether it runs."""
        try:
            super().start()
        except RuntimeError:  # the machine gives no more threads
            raise
        except BaseException:
            self._started.wait(_BEGINNING_S)
            raise

    def run(self) -> None:
        try:
            super().run()
        finally:
            self._ended.set()

    def is_alive(self) -> bool:
        return self._started.is_set() and not self._ended.is_set() and self._process == os.getpid()

    def join(self, timeout: float | None = None) -> None:
        """As that of ``threading.Thread``; returns at once where it never began, or ends with the interpreter."""
        if not self._started.is_set() or sys.is_finalizing():
            return
        if self.is_alive() and self is not threading.current_thread() and not self._ended.wait(timeout):
            return
        super().join(timeout)
