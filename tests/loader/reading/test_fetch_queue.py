"""What is fetched next, and until when the line belongs to what the first batch waits for."""

from __future__ import annotations

import pytest

from penstock.loader.reading.fetching import FetchQueue, Slot


def take_all(queue: FetchQueue, threads: int) -> list[int]:
    """The chunks that are fetched ahead while none of them comes."""
    taken = []
    while (chunk := queue.find_ahead(threads)) is not None:
        queue.take(chunk)
        taken.append(chunk)
    return taken


def ask(queue: FetchQueue, at_once: int, others: int) -> None:
    for chunk in range(at_once + others):
        queue.ask(chunk, at_once=chunk < at_once)


@pytest.mark.parametrize(
    ("threads", "busy"),
    [
        pytest.param(4, 2, id="of a local disk"),
        pytest.param(16, 4, id="of a store nearby"),
        pytest.param(24, 6, id="of a store that is slower"),
    ],
)
def test_others_are_fetched_once_the_first_batch_keeps_a_quarter_of_the_threads_busy(threads: int, busy: int) -> None:
    queue = FetchQueue({chunk: Slot() for chunk in range(40)})
    ask(queue, threads, 8)
    assert take_all(queue, threads) == list(range(threads))
    for chunk in range(threads - busy - 1):
        queue.note_received(chunk)
        queue.forget(chunk)
        assert queue.find_ahead(threads) is None, f"{threads - chunk - 1} of {threads} threads are busy"
    queue.forget(threads - 1)
    assert take_all(queue, threads) == list(range(threads, threads + 8))


def test_what_nobody_needs_at_once_waits_for_nothing_where_the_first_batch_needs_little() -> None:
    queue = FetchQueue({chunk: Slot() for chunk in range(10)})
    ask(queue, 2, 8)
    assert take_all(queue, 4) == list(range(10))
