"""Whatever instant Ctrl-C strikes at, no lock stays taken that nobody would release."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import pytest

from penstock.storage.threads.interruptible import Condition, Event, Future, Thread

STRUCK_S = 0.4
EVERY_S = 0.00013


class StruckError(BaseException):
    """What the signal's handler raises, as Ctrl-C's does KeyboardInterrupt."""


class Strikes:
    """Thousands of signals a second, which raise in the main thread, wherever it is in a function."""

    def __init__(self) -> None:
        self.count = 0
        self._until_s = time.monotonic() + STRUCK_S
        self._is_armed = False

    def handle(self, number: int, frame: object) -> None:
        if self._is_armed:
            self._is_armed = False
            raise StruckError

    def are_enough(self, least: int = 11) -> bool:
        """Whether the time is over, in which there usually are hundreds, and there were so many at least."""
        return self.count >= least and time.monotonic() > self._until_s

    def end(self) -> None:
        """Come no more. The last may be on its way to a thread that waits for a core: not into pytest's handler."""
        signal.setitimer(signal.ITIMER_REAL, 0)
        self._is_armed = False
        time.sleep(0.1)

    def strike(self, function: Callable[[], object]) -> None:
        """Call it over and over until it is struck."""
        try:
            while True:
                self._is_armed = True  # again, where a weak reference's callback was struck, which raises nothing
                function()
        except StruckError:
            self.count += 1


@pytest.fixture
def strikes() -> Iterator[Strikes]:
    strikes, tell = Strikes(), sys.unraisablehook
    sys.unraisablehook = lambda what: None if what.exc_type is StruckError else tell(what)
    before = signal.signal(signal.SIGALRM, strikes.handle)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    yield strikes
    strikes.end()
    signal.signal(signal.SIGALRM, before)
    sys.unraisablehook = tell


def uses_of_condition(condition: Condition) -> dict[str, Callable[[], None]]:
    def enter() -> None:
        with condition:
            pass

    def wait() -> None:
        with condition:
            condition.wait(0.00005)

    def tell() -> None:
        with condition:
            condition.notify_all()

    return {"enter": enter, "wait": wait, "tell": tell}


@pytest.mark.slow
@pytest.mark.parametrize("use", ["enter", "wait", "tell"])
def test_a_condition_is_free_after_its_user_was_struck(strikes: Strikes, use: str) -> None:
    condition = Condition()
    while not strikes.are_enough():
        strikes.strike(uses_of_condition(condition)[use])
        assert not condition._is_owned(), f"after {strikes.count} strikes"


def uses_of_event(event: Event) -> dict[str, Callable[[], object]]:
    return {"set": event.set, "clear": event.clear, "wait": lambda: event.wait(0.00005)}


@pytest.mark.slow
@pytest.mark.parametrize("use", ["set", "clear", "wait"])
def test_an_event_is_free_after_its_user_was_struck(strikes: Strikes, use: str) -> None:
    event = Event()
    while not strikes.are_enough():
        strikes.strike(uses_of_event(event)[use])
        assert not event._changed._is_owned(), f"after {strikes.count} strikes"


def wait_for(future: Future[int]) -> None:
    with suppress(TimeoutError):
        future.result(0.00005)


@pytest.mark.slow
@pytest.mark.parametrize("use", [Future.done, Future.running, Future.cancelled, wait_for])
def test_a_future_is_free_after_its_user_was_struck(strikes: Strikes, use: Callable[[Future[int]], object]) -> None:
    while not strikes.are_enough():
        future: Future[int] = Future()
        strikes.strike(partial(use, future))
        setter = threading.Thread(target=future.set_result, args=[7], daemon=True)
        setter.start()
        setter.join(10)
        assert not setter.is_alive(), f"after {strikes.count} strikes"
        assert future.result() == 7


def test_who_waits_for_a_condition_is_told() -> None:
    condition, told = Condition(), []

    def listen() -> None:
        with condition:
            told.append(condition.wait_for(lambda: len(told) > 0, 10))

    with condition:
        assert not condition.wait(0.001)
        listeners = [threading.Thread(target=listen) for _ in range(3)]
        for listener in listeners:
            listener.start()
    with condition:
        told.append(True)
        condition.notify_all()
    for listener in listeners:
        listener.join(10)
    assert told == [True] * 4


def test_only_its_owner_waits_for_a_condition_or_notifies() -> None:
    condition = Condition()
    for method in (condition.wait, condition.notify):
        with pytest.raises(RuntimeError):
            method()


def test_an_event_wakes_those_who_wait() -> None:
    event = Event()
    assert not event.wait(0.001)
    threading.Timer(0.01, event.set).start()
    assert event.wait(10)
    assert event.is_set()
    event.clear()
    assert not event.is_set()


@pytest.mark.slow
def test_a_thread_whose_start_was_struck_runs_or_never_began(strikes: Strikes) -> None:
    begun: list[Thread] = []

    def begin() -> None:
        begun.append(Thread(target=int, name="struck"))
        begun[-1].start()

    while not strikes.are_enough(1):  # few where one struck thread is waited for
        begun.clear()
        strikes.strike(begin)
        for thread in begun:
            if thread.ident is not None:
                assert thread._started.wait(10), f"after {strikes.count} strikes"
                thread.join(10)
                assert not thread.is_alive()
                assert thread._ended.is_set(), f"after {strikes.count} strikes"


@pytest.mark.slow
@pytest.mark.parametrize("use", [Thread.is_alive, partial(Thread.join, timeout=0.00005)])
def test_a_thread_is_alive_after_whoever_asked_or_waited_was_struck(
    strikes: Strikes, use: Callable[[Thread], object]
) -> None:
    let_go = threading.Event()
    thread = Thread(target=let_go.wait, name="struck")
    thread.start()
    while not strikes.are_enough():
        strikes.strike(partial(use, thread))
        assert thread.is_alive(), f"after {strikes.count} strikes"
    let_go.set()
    thread.join()
    assert not thread.is_alive()


def test_a_thread_does_not_join_itself_and_nobody_waits_for_one_that_never_began() -> None:
    told: list[bool] = []

    def join_itself() -> None:
        with pytest.raises(RuntimeError):
            thread.join()
        told.append(True)

    thread = Thread(target=join_itself, name="joins")
    assert not thread.is_alive()
    thread.join()
    thread.start()
    thread.join(10)
    assert told == [True]


class _StruckOnce(Condition):
    """Ctrl-C comes as the lock is taken again after the first wait."""

    is_struck = False

    def _acquire_restore(self, state: Any) -> None:
        super()._acquire_restore(state)
        if not self.is_struck:
            self.is_struck = True
            raise KeyboardInterrupt


def test_of_a_wait_that_was_interrupted_no_trace_is_left_that_is_notified_in_another_ones_place() -> None:
    condition, is_waiting, told = _StruckOnce(), threading.Event(), list[bool]()
    with condition, pytest.raises(KeyboardInterrupt):
        condition.wait(0)

    def wait() -> None:
        with condition:
            is_waiting.set()
            told.append(condition.wait(20))

    thread = threading.Thread(target=wait)
    thread.start()
    assert is_waiting.wait(60)
    with condition:
        condition.notify()
    thread.join(60)
    assert told == [True]
