"""The threads that the running test has started: loaders of earlier tests may still wait for the garbage collector."""

from __future__ import annotations

import threading
import weakref

_before: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def begin_test() -> None:
    _before.clear()
    _before.update(threading.enumerate())


def started_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread not in _before]
