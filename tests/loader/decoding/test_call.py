"""A call is made once, by whoever comes first, and everybody hears what came of it."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, wait

import pytest

from penstock.loader.decoding.batch import Call
from penstock.storage.threads.daemon_pool import DaemonPool
from penstock.storage.threads.interruptible import Thread


def test_of_many_who_wait_one_makes_the_call() -> None:
    made: list[int] = []
    together = threading.Barrier(8)
    call = Call(lambda: made.append(1))

    def ask() -> None:
        together.wait(60)
        call.result()

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert made == [1]


def test_a_pool_makes_a_call_that_is_begun() -> None:
    pool, made = DaemonPool("test-call", 1), list[str]()
    call = Call(lambda: made.append(threading.current_thread().name))
    call.begin(pool)
    call.begin(pool)
    assert wait([call], 60).done
    call.result()
    assert made == ["test-call"]
    pool.close()
    later = Call(lambda: made.append("here"))
    later.begin(pool)  # which takes no more
    later.result()
    assert made == ["test-call", "here"]


def test_where_no_thread_can_be_started_whoever_asks_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def start_none(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(Thread, "start", start_none)
    call = Call(lambda: "made")
    call.begin(DaemonPool("test-call", 1))
    assert call.result() == "made"


def test_what_it_raises_is_raised_for_all_who_ask() -> None:
    def fail() -> None:
        raise KeyError("why")

    call = Call(fail)
    for _ in range(2):
        with pytest.raises(KeyError, match="why"):
            call.result()
    assert not call.cancel()


def test_a_call_that_is_cancelled_is_not_made() -> None:
    made: list[int] = []
    call = Call(lambda: made.append(1))
    assert call.cancel()
    assert call.cancel()
    assert wait([call], 60).done
    with pytest.raises(CancelledError):
        call.result()
    pool = DaemonPool("test-call", 1)
    call.begin(pool)
    pool.close()
    assert not made
