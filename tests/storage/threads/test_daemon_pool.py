"""Threads that run jobs in order and hold up nobody's exit."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from contextlib import suppress

import pytest
from interrupt import Interrupt

from penstock.storage.threads.daemon_pool import DaemonPool, PoolClosedError
from penstock.storage.threads.interruptible import Thread

WAIT_S = 60


@pytest.fixture
def make_pool() -> Iterator[Callable[[int | None], DaemonPool]]:
    """Pools that are closed after the test."""
    pools: list[DaemonPool] = []

    def make(max_threads: int | None = None) -> DaemonPool:
        pools.append(DaemonPool(f"test-pool {len(pools)}", max_threads))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()
    assert own_threads() == []


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("test-pool")]


MakePool = Callable[[int | None], DaemonPool]


def test_the_number_of_threads_follows_the_limit_while_jobs_wait_and_run(make_pool: MakePool) -> None:
    pool, gate, running = make_pool(1), threading.Event(), threading.Semaphore(0)

    def job(number: int) -> int:
        running.release()
        assert gate.wait(WAIT_S)
        return number

    jobs = [pool.submit(job, number) for number in range(8)]
    pool.limit(4)
    for _ in range(4):
        assert running.acquire(timeout=WAIT_S), "jobs that waited were given no thread"
    assert len(own_threads()) == 4
    pool.limit(2)
    gate.set()
    assert [one.result(WAIT_S) for one in jobs] == list(range(8))
    until = time.monotonic() + WAIT_S
    while len(own_threads()) > 2:
        assert time.monotonic() < until, "idle threads that are too many stay"
        time.sleep(0.001)
    assert pool.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)
    pool.limit(1)
    last = [pool.submit(divmod, number, 2) for number in range(100)]
    pool.close()
    assert [one.result(0) for one in last] == [divmod(number, 2) for number in range(100)]
    pool.limit(3)  # after its end nothing


def test_a_future_has_what_its_job_returned_or_raised(make_pool: MakePool) -> None:
    pool = make_pool(2)
    assert pool.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 7, 0).result(WAIT_S)
    assert pool.submit(os.getpid).result(WAIT_S) == os.getpid()


def test_jobs_start_in_the_order_of_submission(make_pool: MakePool) -> None:
    pool, started = make_pool(1), []
    for number in range(100):
        last = pool.submit(started.append, number)
    last.result(WAIT_S)
    assert started == list(range(100))


def test_no_more_threads_run_than_the_maximum_and_no_more_than_there_are_jobs(make_pool: MakePool) -> None:
    pool, together = make_pool(3), threading.Barrier(3)
    futures = [pool.submit(together.wait, WAIT_S) for _ in range(9)]
    for future in futures:
        future.result(WAIT_S)
    assert len(own_threads()) == 3
    single = make_pool(3)
    single.submit(int).result(WAIT_S)
    assert len(own_threads()) == 4


def test_without_a_maximum_all_jobs_run_at_one_time(make_pool: MakePool) -> None:
    pool, together = make_pool(None), threading.Barrier(40)
    for future in [pool.submit(together.wait, WAIT_S) for _ in range(40)]:
        future.result(WAIT_S)
    assert len(own_threads()) == 40


def test_an_idle_thread_takes_the_next_job(make_pool: MakePool) -> None:
    pool = make_pool(None)
    for _ in range(200):
        pool.submit(int).result(WAIT_S)
    # One that is just about to be idle counts as busy.
    assert len(own_threads()) < 20


def test_a_job_that_still_waits_can_be_cancelled(make_pool: MakePool) -> None:
    pool, let_go, ran = make_pool(1), threading.Event(), []
    pool.submit(let_go.wait, WAIT_S)
    waiting = pool.submit(ran.append, 1)
    assert waiting.cancel()
    let_go.set()
    pool.submit(int).result(WAIT_S)
    assert ran == []
    with pytest.raises(CancelledError):
        waiting.result(WAIT_S)


def test_closing_ends_the_threads_after_all_that_was_submitted(make_pool: MakePool) -> None:
    pool, done = make_pool(2), []
    for number in range(50):
        pool.submit(done.append, number)
    pool.close()
    assert sorted(done) == list(range(50))
    assert own_threads() == []
    with pytest.raises(PoolClosedError, match="test-pool"):
        pool.submit(int)
    pool.close()


def test_closing_waits_no_longer_than_it_may(make_pool: MakePool) -> None:
    pool, let_go = make_pool(2), threading.Event()
    busy = pool.submit(let_go.wait, WAIT_S)
    pool.close(timeout_s=0.05)
    assert not busy.done()
    let_go.set()
    assert busy.result(WAIT_S)
    for thread in own_threads():
        thread.join(WAIT_S)


def test_a_job_may_close_its_own_pool(make_pool: MakePool) -> None:
    pool = make_pool(2)
    pool.submit(pool.close).result(WAIT_S)
    for thread in own_threads():
        thread.join(WAIT_S)


@pytest.mark.slow
def test_an_idle_thread_keeps_nothing_of_its_last_job_alive(make_pool: MakePool) -> None:
    class Rows:
        pass

    pool, rows = make_pool(1), Rows()
    gone = weakref.ref(rows)
    future = pool.submit(lambda given: given, rows)
    assert future.result(WAIT_S) is rows
    del future, rows
    pool.submit(int).result(WAIT_S)  # the thread has let go of the job before
    gc.collect()
    assert gone() is None


def test_a_maximum_of_no_thread_is_refused() -> None:
    with pytest.raises(ValueError, match="max_threads=0: needs 1 or more"):
        DaemonPool("test-pool", 0)


def run_python(program: str) -> str:
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=WAIT_S).stdout


def test_the_exit_of_the_interpreter_waits_for_no_job() -> None:
    program = """
        import time
        from penstock.storage.threads.daemon_pool import DaemonPool
        pool = DaemonPool("test-pool", 1)
        for _ in range(10):
            pool.submit(time.sleep, 600)
        print("out")
    """
    assert run_python(program) == "out\n"


def test_after_a_fork_an_open_pool_works_and_a_closed_one_stays_closed() -> None:
    program = """
        import os, threading
        from penstock.storage.threads.daemon_pool import DaemonPool, PoolClosedError
        opened, closed, let_go = DaemonPool("opened", 1), DaemonPool("closed"), threading.Event()
        closed.submit(int).result()
        closed.close()
        busy = opened.submit(let_go.wait)
        opened._lock.acquire()  # as another thread may while this one forks
        if os.fork() == 0:
            print(opened.submit(os.getpid).result(30) == os.getpid(), flush=True)
            try:
                closed.submit(int)
            except PoolClosedError:
                print("closed", flush=True)
            os._exit(0)
        os.wait()
        opened._lock.release()
        let_go.set()
        print(busy.result(30), opened.submit(os.getpid).result(30) == os.getpid())
    """
    assert run_python(program) == "True\nclosed\nTrue True\n"


@pytest.mark.slow
def test_a_pool_that_was_interrupted_at_any_line_does_its_jobs_and_leaves_no_thread() -> None:
    functions = [DaemonPool._start_thread, Thread.start, Thread.join]
    number, was_raised = 0, True
    while was_raised:
        pool, interrupt = DaemonPool("test-pool", 2), Interrupt(functions, number)
        with suppress(KeyboardInterrupt), interrupt:
            assert pool.submit(int).result(WAIT_S) == 0
            pool.close()
        with suppress(PoolClosedError):
            assert pool.submit(int).result(WAIT_S) == 0, f"line {number}"
        pool.close()
        assert own_threads() == [], f"line {number}"
        number, was_raised = number + 1, interrupt.was_raised
    assert number > 5


def test_a_pool_that_nobody_can_close_any_more_ends_its_threads_when_its_jobs_are_done() -> None:
    let_go = threading.Event()
    pool = DaemonPool("test-pool")
    jobs = [pool.submit(let_go.wait, WAIT_S) for _ in range(3)]
    del pool
    assert len(own_threads()) == 3
    let_go.set()
    assert [job.result(WAIT_S) for job in jobs] == [True] * 3
    until = time.monotonic() + WAIT_S
    while own_threads():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_map_that_ends_early_begins_no_more_calls(make_pool: MakePool) -> None:
    pool, called, let_go = make_pool(1), list[int](), threading.Event()

    def call(number: int) -> int:
        called.append(number)
        assert number == 0 or let_go.wait(WAIT_S)
        return number

    results = pool.map(call, range(50))
    assert next(results) == 0
    results.close()  # type: ignore[attr-defined]
    let_go.set()
    pool.close()
    assert len(called) <= 2


def test_an_error_in_a_pools_block_cancels_what_has_not_begun() -> None:
    running, let_go = threading.Event(), threading.Event()

    def work() -> None:
        running.set()
        assert let_go.wait(WAIT_S)

    with suppress(ArithmeticError), DaemonPool("test-pool", 1) as pool:
        jobs = [pool.submit(work) for _ in range(3)]
        assert running.wait(WAIT_S)
        threading.Timer(0.05, let_go.set).start()
        raise ArithmeticError
    assert jobs[0].result(WAIT_S) is None
    assert [job.cancelled() for job in jobs] == [False, True, True]


@pytest.mark.slow
def test_ctrl_c_in_a_pools_block_does_not_wait_for_a_job_that_hangs() -> None:
    running, let_go = threading.Event(), threading.Event()

    def work() -> bool:
        running.set()
        return let_go.wait(WAIT_S)

    with suppress(KeyboardInterrupt), DaemonPool("test-pool", 1) as pool:
        job = pool.submit(work)
        assert running.wait(WAIT_S)
        raise KeyboardInterrupt
    assert not job.done()
    let_go.set()
    assert job.result(WAIT_S)


@pytest.mark.slow
def test_a_generator_that_closes_its_pool_as_the_interpreter_ends_holds_nothing_up() -> None:
    script = """
        import time
        from penstock.storage.threads.daemon_pool import DaemonPool

        def work():
            pool = DaemonPool("test-pool", 1)
            try:
                yield pool.submit(time.sleep, 600)
            finally:
                pool.close(cancel=True)

        held = work()
        next(held)
        raise KeyboardInterrupt
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=WAIT_S, check=False
    )
    assert ended.stderr.endswith("KeyboardInterrupt\n")
