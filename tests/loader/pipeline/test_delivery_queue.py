"""The queue between the assembler and the training loop: its bounds, its end, its errors."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from penstock.loader.decoding.batch import UnfinishedBatch
from penstock.loader.errors import LoaderClosedError
from penstock.loader.pipeline.delivery_queue import _MOST_COPIED_BYTES, _MOST_ON_CALL, Delivery, DeliveryQueue


def delivery(number: int, nbytes: int) -> Delivery:
    return Delivery(0, number, number + 1, np.array([number]), nbytes, object())


def test_two_deliveries_are_taken_whatever_their_size_and_no_third_beyond_the_bytes():
    queue = DeliveryQueue(max_bytes=10)
    assert queue.put(delivery(0, 1000))
    assert queue.put(delivery(1, 1000))
    third = threading.Thread(target=queue.put, args=(delivery(2, 1),))
    third.start()
    third.join(0.05)
    assert third.is_alive()
    assert queue.get().start == 0
    third.join(60)  # one waits, and there may always be two
    assert not third.is_alive()
    assert [queue.get().start for _ in range(2)] == [1, 2]


def test_the_number_of_deliveries_is_bounded_too():
    queue = DeliveryQueue(max_bytes=1 << 40, max_items=3)
    for number in range(3):
        assert queue.put(delivery(number, 0))
    fourth = threading.Thread(target=queue.put, args=(delivery(3, 0),))
    fourth.start()
    fourth.join(0.05)
    assert fourth.is_alive()
    assert [queue.get().start for _ in range(4)] == [0, 1, 2, 3]
    fourth.join(60)
    assert not fourth.is_alive()


class OnCall(UnfinishedBatch):
    is_on_call = True

    def __init__(self) -> None:
        self.has_begun = False

    def result(self) -> str:
        return "made"

    def cancel(self) -> None:
        pass

    def begin(self) -> None:
        self.has_begun = True


class Copied(OnCall):
    is_on_call = False
    is_copied = True


def test_of_batches_that_are_only_copied_no_more_wait_than_a_cache_may_hold():
    queue, size = DeliveryQueue(max_bytes=1 << 40), _MOST_COPIED_BYTES // 4
    copied = [replace(delivery(number, size), batch=Copied()) for number in range(5)]
    for item in copied[:4]:
        assert queue.put(item)
    assert not queue.is_short()
    last = threading.Thread(target=queue.put, args=(copied[4],))
    last.start()
    last.join(0.05)
    assert last.is_alive()
    assert [queue.get().start for _ in range(5)] == [0, 1, 2, 3, 4]
    last.join(60)
    assert not last.is_alive()
    for number in range(8):
        assert queue.put(delivery(number, size))  # others take the room that the queue has
    assert queue.is_short()


def test_of_batches_that_are_made_on_call_a_few_wait_and_the_first_ones_are_begun():
    queue = DeliveryQueue(max_bytes=1 << 40)
    batches = [OnCall() for _ in range(_MOST_ON_CALL + 1)]
    items = [replace(delivery(number, 0), batch=batch) for number, batch in enumerate(batches)]
    for item in items[:-1]:
        assert queue.put(item)
    queue.begin(2)
    assert [batch.has_begun for batch in batches] == [True, True] + [False] * (_MOST_ON_CALL - 1)
    last = threading.Thread(target=queue.put, args=(items[-1],))
    last.start()
    last.join(0.05)
    assert last.is_alive()
    half = _MOST_ON_CALL // 2
    assert [queue.get().start for _ in range(half - 1)] == list(range(half - 1))
    last.join(0.05)
    assert last.is_alive()  # nobody is woken for each batch
    assert queue.get().start == half - 1
    last.join(60)
    assert not last.is_alive()
    assert [queue.get().start for _ in items[half:]] == list(range(half, len(items)))


def test_ctrl_c_before_the_producing_thread_is_woken_does_not_leave_it_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = DeliveryQueue(max_bytes=1 << 40)
    items = [replace(delivery(number, 0), batch=OnCall()) for number in range(_MOST_ON_CALL + 1)]
    for item in items[:-1]:
        assert queue.put(item)
    last = threading.Thread(target=queue.put, args=(items[-1],), daemon=True)
    last.start()
    while not queue._changed._waiters:
        time.sleep(0.001)
    half = _MOST_ON_CALL // 2
    for _ in range(half - 1):
        queue.get()
    with monkeypatch.context() as patch:
        patch.setattr(queue._changed, "notify_all", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            queue.get()
    assert last.is_alive()
    queue.get()
    last.join(60)
    assert not last.is_alive()


def _interrupt() -> None:
    raise KeyboardInterrupt


def test_an_error_comes_after_what_was_made_before_it_and_again_to_who_asks_again():
    queue = DeliveryQueue(max_bytes=100)
    queue.put(delivery(0, 1))
    queue.fail(ZeroDivisionError("broken"))
    assert queue.get().start == 0
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="broken"):
            queue.get()


def test_closing_wakes_producer_and_consumer():
    full, empty = DeliveryQueue(max_bytes=1), DeliveryQueue(max_bytes=1)
    for number in range(2):
        full.put(delivery(number, 1))
    results: list[object] = []

    def produce() -> None:
        results.append(full.put(delivery(2, 1)))

    def consume() -> None:
        try:
            empty.get()
        except LoaderClosedError as exc:
            results.append(exc)

    threads = [threading.Thread(target=work) for work in (produce, consume)]
    for thread in threads:
        thread.start()
    for queue in (full, empty):
        queue.close()
        queue.close()
    for thread in threads:
        thread.join(60)
    assert sorted(map(str, results)) == ["False", "the loader was closed while it waited for a batch"]
    assert not full.put(delivery(3, 1))
    with pytest.raises(LoaderClosedError):
        full.get()


def test_it_is_short_while_it_holds_less_than_half_of_what_it_takes():
    by_bytes, by_count, on_call = DeliveryQueue(100), DeliveryQueue(1 << 40, max_items=6), DeliveryQueue(1 << 40)
    for queue, item, enough in (
        (by_bytes, delivery(0, 10), 5),
        (by_count, delivery(0, 10), 3),
        (on_call, replace(delivery(0, 10), batch=OnCall()), _MOST_ON_CALL // 2),
        (DeliveryQueue(0), delivery(0, 10), 2),
    ):
        for _ in range(enough):
            assert queue.is_short()
            queue.put(item)
        assert not queue.is_short()
        queue.get()
        assert queue.is_short()
