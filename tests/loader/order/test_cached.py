"""Cached properties: no thread, loader or process waits for another that computes one."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from penstock.loader.order.cached import cached_property

WITHIN_S = 30


class Slow:
    """``value`` is computed when ``may_go`` is set; ``begun`` tells that it is being computed."""

    def __init__(self) -> None:
        self.begun, self.may_go = threading.Event(), threading.Event()

    @cached_property
    def value(self) -> object:
        self.begun.set()
        assert self.may_go.wait(WITHIN_S)
        return object()


def test_an_object_computes_while_another_of_its_class_does() -> None:
    slow, other = Slow(), Slow()
    other.may_go.set()
    with ThreadPoolExecutor() as pool:
        held = pool.submit(lambda: slow.value)
        assert slow.begun.wait(WITHIN_S)
        assert pool.submit(lambda: other.value).result(WITHIN_S / 2) is other.value
        slow.may_go.set()
        assert held.result(WITHIN_S) is slow.value


def test_threads_that_ask_at_once_get_one_value() -> None:
    slow = Slow()
    with ThreadPoolExecutor() as pool:
        asked = [pool.submit(lambda: slow.value) for _ in range(4)]
        assert slow.begun.wait(WITHIN_S)
        slow.may_go.set()
        assert {id(each.result(WITHIN_S)) for each in asked} == {id(slow.value)}


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")  # that it has threads and forks
def test_a_child_that_is_forked_while_a_thread_computes_computes_its_own() -> None:
    slow, other = Slow(), Slow()
    other.may_go.set()
    with ThreadPoolExecutor() as pool:
        pool.submit(lambda: slow.value)
        assert slow.begun.wait(WITHIN_S)
        child = os.fork()
        if child == 0:
            signal.alarm(WITHIN_S // 2)  # a child that hangs dies
            os._exit(other.value is None)
        slow.may_go.set()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
