"""The threads of a chunk reader fetch what is due first, do not wait in vain, and end when they are told to."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pytest
from fake_chunks import FakeSource, close, fetch_threads, make_reader, wait_until

from penstock.loader.columns import Block
from penstock.loader.errors import LoaderClosedError
from penstock.loader.reading import chunk_reader

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


def test_a_failure_of_a_fetch_thread_itself_is_raised_where_the_chunk_is_waited_for():
    def fail(_: Sequence[int]) -> dict[int, int]:
        raise ZeroDivisionError

    reader = make_reader(FakeSource([10, 10]), 10, next_use=fail)
    reader.request([0, 1])
    assert len(list(reader.take([0]))) == 1  # it is in memory now, and there is no room for another
    with pytest.raises(ZeroDivisionError):
        list(reader.take([1]))
    close(reader)


def test_closing_wakes_the_one_who_waits_for_a_chunk():
    source = FakeSource([10], held=frozenset([0]))
    reader = make_reader(source, 100)
    reader.request([0])
    failed: list[BaseException] = []

    def take() -> None:
        try:
            list(reader.take([0]))
        except LoaderClosedError as exc:
            failed.append(exc)

    waiting = threading.Thread(target=take)
    waiting.start()
    threading.Timer(0.1, source.gate.set).start()
    close(reader)
    waiting.join(60)
    assert failed
    assert (reader.resident_bytes, reader._requested_bytes) == (0, 0)


@pytest.mark.slow
def test_closing_does_not_wait_for_each_of_many_hanging_fetches():
    source = FakeSource([10] * 8, held=frozenset(range(8)))
    reader = make_reader(source, 1000, threads=8)
    reader.request(range(8))
    wait_until(lambda: len(source.loads) == 8, "not all were fetched")
    started = time.monotonic()
    close(reader, within_s=3.0)
    assert time.monotonic() - started < 15  # waiting so long for each takes 24 s
    source.gate.set()
    wait_until(lambda: not fetch_threads(), "a thread is left")
    assert reader.resident_bytes == 0


def test_what_is_waited_for_is_told_while_it_is_waited_for_and_no_longer() -> None:
    source = FakeSource([10] * 4, held=frozenset({1}))
    reader = make_reader(source, budget=40, threads=2)
    reader.request([0, 1, 2])
    assert reader.list_missing() == ([], 0.0)
    taken: list[int] = []
    taker = threading.Thread(target=lambda: taken.extend(chunk for chunk, _ in reader.take([0, 1, 2])))
    taker.start()
    wait_until(lambda: len(taken) == 2 and reader.list_missing()[0], "the others to be taken")
    missing, first_s = reader.list_missing()
    time.sleep(0.05)
    assert missing == [1]
    assert reader.list_missing()[1] >= first_s + 0.05
    source.gate.set()
    taker.join(60)
    assert reader.list_missing() == ([], 0.0)
    close(reader)


def test_no_more_than_the_read_ahead_is_fetched_before_it_is_asked_for_and_all_comes_in_order() -> None:
    source = FakeSource([10] * 12)
    reader = make_reader(source, 1000, threads=4)
    reader.set_read_ahead(25)
    reader.request(range(12))
    wait_until(lambda: reader.levels().resident_chunks == 2, "too little is read ahead")
    for chunk in range(12):
        assert [found for found, _ in reader.take([chunk])] == [chunk]
        ahead = min(12, chunk + 3)
        wait_until(lambda ahead=ahead: reader.levels().resident_chunks == ahead, "taking a chunk makes room for one")
        assert reader.levels().chunks_in_flight == 0
    assert source.loads == sorted(source.loads)
    assert reader.spent()[1] > 0
    reader.release(range(12))
    assert reader.resident_bytes == 0
    assert reader._memory.untaken == 0
    close(reader)


def test_a_read_ahead_of_one_byte_still_fetches_one_chunk_ahead_and_evicts_none() -> None:
    source = FakeSource([10] * 6)
    reader = make_reader(source, 1000)
    reader.set_read_ahead(1)
    reader.request(range(6))
    for start in range(0, 6, 2):
        assert len(list(reader.take([start, start + 1]))) == 2
    assert sorted(source.loads) == list(range(6))
    close(reader)


def test_threads_come_and_go_while_chunks_are_fetched() -> None:
    source = FakeSource([1] * 40, held=frozenset(range(40)))
    reader = make_reader(source, 1000, threads=1)
    reader.request(range(40))
    wait_until(lambda: reader.levels().chunks_in_flight == 1, "nothing is fetched")
    reader.set_threads(5)
    wait_until(lambda: reader.levels().chunks_in_flight == 5, "new threads fetch nothing")
    reader.set_threads(2)
    source.gate.set()
    assert len(list(reader.take(range(40)))) == 40
    wait_until(lambda: len(fetch_threads()) == 2, "threads that are too many stay")
    assert reader.levels().fetch_threads == 2
    close(reader)
    reader.set_threads(4)
    assert not fetch_threads()


def test_what_the_first_batch_waits_for_has_the_line_to_itself_until_it_keeps_few_threads_busy() -> None:
    source = FakeSource([10] * 30, held=frozenset(range(30)))
    reader = make_reader(source, budget=1000, threads=8)
    try:
        reader.request([3, 4, 5], at_once=True)
        reader.request([6, 7], at_once=True)
        reader.request(range(10, 30))
        wait_until(lambda: len(source.loads) == 5, "the threads take what is needed at once")
        assert set(source.loads) == {3, 4, 5, 6, 7}  # five of eight threads are busy, and three stay idle
        reader.release([7])  # it is on its way, and keeps its thread busy
        source.held = frozenset()
        source.gate.set()
        wait_until(lambda: len(source.loads) == 25, "all are fetched in the end")
        assert source.loads[5:] == list(range(10, 30))
        assert {chunk for chunk, _ in reader.take([3, 4, 5, 6])} == {3, 4, 5, 6}
    finally:
        source.gate.set()
        close(reader)


def test_on_a_long_line_others_are_asked_for_before_all_that_is_needed_at_once_is_opened() -> None:
    at_once = range(24)
    source = FakeSource([10] * 40, shut=frozenset(at_once), held=frozenset([7, 8, 9, 30, 31]))
    reader = make_reader(source, budget=1000, threads=32)
    try:
        reader.request(at_once, at_once=True)
        reader.request(range(30, 40))
        wait_until(lambda: len(source.loads) > 24, "others wait for what is being opened")
        assert set(source.loads[:24]) == set(at_once)
    finally:
        source.gate.set()
        close(reader)


def test_threads_that_fetch_do_not_wait_for_those_that_open_until_as_many_chunks_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(chunk_reader, "usable_cores", lambda: 2)
    source = FakeSource([10] * 40, shut=frozenset(range(40)))
    reader = make_reader(source, budget=300, threads=5)
    try:
        reader.request(range(40))
        wait_until(lambda: len(source.loads) >= 7, "two threads open, and the others do not fetch")
        wait_until(lambda: len(source.opening) == 2, "nobody opens")
        time.sleep(0.02)
        assert len(source.loads) <= 2 + 5 + 3  # opened, waiting, and on their way meanwhile
        assert len(source.opening) == 2
        source.gate.set()
        for chunk, loaded in reader.take(range(40)):
            assert isinstance(loaded, Block)
            reader.release([chunk])
        assert sorted(source.opening) == list(range(40))
        assert reader.levels().peak_bytes <= 300
    finally:
        source.gate.set()
        close(reader)


def test_a_reader_that_is_closed_opens_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_reader, "usable_cores", lambda: 1)
    source = FakeSource([10] * 3, shut=frozenset(range(3)), held=frozenset([2]))
    reader = make_reader(source, budget=1000, threads=3)
    reader.request(range(3))
    wait_until(lambda: len(source.loads) == 3 and source.opening, "not all are asked for")
    reader.stop()
    source.gate.set()
    close(reader)
    assert len(source.opening) == 1
    assert reader.resident_bytes == 0


def test_a_reader_that_is_closed_amid_a_span_says_so() -> None:
    reader = make_reader(FakeSource([1] * 4), 1000)
    reader.request(range(4))
    taken = reader.take([0, 1])
    next(taken)
    close(reader)
    with pytest.raises(LoaderClosedError):
        list(taken)
    with pytest.raises(LoaderClosedError):
        list(reader.take([2]))
    reader.request([2, 3])
    reader.release([0, 1])
    assert not reader.levels().queued_chunks
