"""Chunks are all delivered and kept while they are needed; the budget holds, and no count is left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

import pytest
from fake_chunks import FakeSource, close, make_reader, wait_until

from penstock.loader.columns import Block
from penstock.loader.counters import Counters
from penstock.loader.errors import FormatError
from penstock.loader.reading.chunk_memory import ChunkMemory, Leases
from penstock.loader.reading.fetching import Slot

pytestmark = pytest.mark.usefixtures("no_thread_is_left")


@pytest.mark.parametrize("seed", range(24))
def test_whatever_the_order_all_is_delivered_within_the_budget_and_accounts_end_at_zero(seed):
    draw = random.Random(seed)
    chunks = 40
    sizes = [draw.randint(1, 100) for _ in range(chunks)]
    failing = frozenset(draw.sample(range(chunks), draw.choice([0, 0, 5])))
    source = FakeSource(sizes, seed, latency_s=draw.choice([0.0, 0.0005, 0.002]), failing=failing)
    budget = draw.choice([1, 50, 300, 1000, 10_000])
    # Windows of a few chunks, some in two of them; each is used by several takes before it is let go.
    windows = [draw.sample(range(chunks), draw.randint(1, 8)) for _ in range(25)]
    ahead = draw.randint(1, 6)
    uses: dict[int, list[int]] = {}
    for number, window in enumerate(windows):
        for chunk in window:
            uses.setdefault(chunk, []).append(number)
    at = 0

    def next_use(candidates: Sequence[int]) -> dict[int, int]:
        return {chunk: next((use for use in uses[chunk] if use > at), 10**9) for chunk in candidates}

    reader = make_reader(source, budget, threads=draw.randint(1, 8), next_use=next_use)
    requested = 0
    for at, window in enumerate(windows):
        while requested < len(windows) and (requested <= at or (requested < at + ahead and reader.has_room)):
            reader.request(windows[requested])
            requested += 1
        for _ in range(draw.randint(1, 3)):
            taken = {}
            for chunk, loaded in reader.take(window):
                assert chunk not in taken
                assert isinstance(loaded, FormatError if chunk in failing else Block)
                taken[chunk] = loaded
                if draw.random() < 0.1:
                    time.sleep(0.0005)
            assert taken.keys() == set(window)
        reader.release(window)
    wait_until(lambda: reader.resident_bytes == 0, "bytes are still counted after the last release")
    assert reader.has_room
    assert reader._requested_bytes == 0
    assert reader._slots == {}
    assert reader.levels().peak_bytes <= budget + max(sizes)
    close(reader)


def test_chunks_are_fetched_ahead_in_the_order_of_first_use_until_the_budget_is_full():
    source = FakeSource([10] * 20)
    reader = make_reader(source, 50, threads=1)
    reader.request(range(20))
    wait_until(lambda: len(source.loads) == 5, "the budget was not filled")
    time.sleep(0.02)
    assert source.loads == [0, 1, 2, 3, 4]
    assert not reader.has_room
    reader.release([0, 1])
    wait_until(lambda: len(source.loads) == 7, "what was let go did not make room")
    assert source.loads[5:] == [5, 6]
    close(reader)


def test_the_chunk_whose_next_use_is_furthest_off_is_evicted():
    source = FakeSource([10] * 6)
    uses = {0: 7, 1: 3, 2: 9, 3: 1, 4: 20}
    reader = make_reader(source, 40, threads=1, next_use=lambda chunks: {chunk: uses[chunk] for chunk in chunks})
    reader.request(range(6))
    wait_until(lambda: reader.resident_bytes == 40, "the budget was not filled")
    assert [chunk for chunk, _ in reader.take([4])] == [4]
    assert 2 not in {chunk for chunk, slot in reader._slots.items() if slot.block is not None}
    assert {0, 1, 3, 4} <= {chunk for chunk, slot in reader._slots.items() if slot.block is not None}
    assert [chunk for chunk, _ in reader.take([2])] == [2]
    assert source.loads.count(2) == 2
    close(reader)


def test_a_chunk_is_not_evicted_while_it_is_used():
    source = FakeSource([10] * 2)
    reader = make_reader(source, 10, threads=2)
    reader.request([0, 1])
    taking = reader.take([0, 1])
    first, _ = next(taking)
    time.sleep(0.05)  # the other does not fit beside it
    assert reader.resident_bytes == 10
    assert source.loads == [first]
    assert [chunk for chunk, _ in taking] == [1 - first]
    assert reader.levels().peak_bytes == 10
    close(reader)


def test_a_chunk_larger_than_the_budget_is_read_all_the_same():
    reader = make_reader(FakeSource([1000, 1, 1000]), 10)
    reader.request([0, 1, 2])
    assert sorted(chunk for chunk, _ in reader.take([0, 1, 2])) == [0, 1, 2]
    reader.release([0, 1, 2])
    wait_until(lambda: reader.resident_bytes == 0, "bytes are still counted")
    close(reader)


def test_of_chunks_larger_than_the_budget_no_two_are_held_at_a_time() -> None:
    source = FakeSource([1000, 1000], held=frozenset({0}))
    reader = make_reader(source, 10)
    reader.request([0, 1])
    wait_until(lambda: source.loads == [0], "the first is not fetched ahead of need")
    taking = threading.Thread(target=list, args=(reader.take([1]),))
    taking.start()
    time.sleep(0.05)  # the second does not fit beside it
    assert source.loads == [0]
    source.gate.set()
    taking.join()
    assert source.loads == [0, 1]
    assert reader.levels().peak_bytes == 1000
    close(reader)


def test_what_views_keep_alive_leaves_less_for_reading_ahead_until_they_are_gone():
    source, leases = FakeSource([100] * 6), Leases(1000)
    reader = make_reader(source, budget=200, leases=leases)
    reader.request([0])
    ((_, block),) = reader.take([0])
    assert isinstance(block, Block)
    view = leases.lend(block.columns["raw"].buffer)  # type: ignore[union-attr]
    reader.release([0])
    assert reader.resident_bytes == 100
    reader.request([1, 2, 3])
    wait_until(lambda: reader.resident_bytes == 200, "one chunk beside the one that is kept")
    assert not reader.has_room
    ((_, loaded),) = reader.take([1])
    assert isinstance(loaded, Block)
    assert source.loads == [0, 1]
    del view, block
    reader.request([4])
    wait_until(lambda: source.loads == [0, 1, 2], "the next chunk, in the room of the one that was kept")
    close(reader)


def test_a_chunk_in_two_windows_stays_until_both_are_closed():
    source = FakeSource([10])
    reader = make_reader(source, 100)
    reader.request([0])
    reader.request([0])
    list(reader.take([0]))
    reader.release([0])
    assert [chunk for chunk, _ in reader.take([0])] == [0]
    assert source.loads == [0]
    reader.release([0])
    assert reader.resident_bytes == 0
    close(reader)


@pytest.mark.parametrize("again", [False, True])
def test_a_chunk_released_while_in_flight_is_dropped_unless_it_is_requested_again(again):
    source = FakeSource([10], held=frozenset([0]))
    reader = make_reader(source, 100)
    reader.request([0])
    wait_until(lambda: source.loads == [0], "the chunk was not fetched")
    reader.release([0])
    if again:
        reader.request([0])
    source.gate.set()
    if again:
        assert [chunk for chunk, _ in reader.take([0])] == [0]
        assert source.loads == [0]  # the fetch that was under way served
        reader.release([0])
    wait_until(lambda: reader.resident_bytes == 0, "a chunk that nobody needs is kept")
    assert reader._slots == {}
    close(reader)


def test_a_chunk_released_before_it_was_fetched_is_not_fetched():
    source = FakeSource([10, 10, 10], held=frozenset([0]))
    reader = make_reader(source, 100, threads=1)
    reader.request([0, 1, 2])
    wait_until(lambda: source.loads == [0], "the chunk was not fetched")
    reader.release([1])
    source.gate.set()
    list(reader.take([2]))
    assert source.loads == [0, 2]
    close(reader)


def test_an_error_is_given_to_every_take_until_the_chunk_is_released_and_then_tried_again():
    source = FakeSource([10], failing=frozenset([0]))
    reader = make_reader(source, 100)
    reader.request([0])
    for _ in range(2):
        ((_, error),) = reader.take([0])
        assert isinstance(error, FormatError)
    assert source.loads == [0]
    assert reader.resident_bytes == 0
    reader.release([0])
    source.failing = frozenset()
    reader.request([0])
    ((_, block),) = reader.take([0])
    assert isinstance(block, Block)
    close(reader)


def test_chunks_that_nobody_asks_for_stay_until_there_is_no_room():
    source = FakeSource([10] * 6, failing=frozenset([3]))
    reader = make_reader(source, 40, threads=1, keeps_unused=True)
    reader.request([0, 1, 2, 3])
    list(reader.take([0, 1, 2, 3]))
    reader.release([2, 0, 1, 3])
    assert reader.resident_bytes == 30
    assert reader.has_room
    assert reader.keeps_unused
    reader.request([0])
    assert [chunk for chunk, _ in reader.take([0])] == [0]
    assert source.loads == [0, 1, 2, 3]
    reader.request([4, 5])  # the second takes the place of those that nobody asks for
    assert {chunk for chunk, _ in reader.take([4, 5])} == {4, 5}
    assert source.loads == [0, 1, 2, 3, 4, 5]
    assert {chunk for chunk, slot in reader._slots.items() if slot.block is not None} == {0, 4, 5}
    assert not reader.keeps_unused
    reader.release([0, 4])
    assert reader.resident_bytes == 10
    assert reader.levels().peak_bytes <= 50
    close(reader)
    assert reader.resident_bytes == 0


def test_a_chunk_that_is_needed_takes_the_place_of_those_that_nobody_asks_for():
    source = FakeSource([10, 10, 40])
    reader = make_reader(source, 40, threads=1, keeps_unused=True)
    for chunk in (0, 1, 2, 0, 2, 1):
        reader.request([chunk])
        assert [chunk for chunk, _ in reader.take([chunk])] == [chunk]
        reader.release([chunk])
    assert reader.levels().peak_bytes <= 50
    close(reader)


def test_what_makes_room_for_headers_is_no_longer_counted_as_unused():
    source = FakeSource([10] * 4)
    slots = {chunk: Slot() for chunk in range(4)}
    memory = ChunkMemory(
        slots,
        source,  # type: ignore[arg-type]
        40,
        lambda chunks: dict.fromkeys(chunks, 0),
        Counters(),
        None,
        keeps_unused=True,
    )
    for chunk in (0, 1):
        memory.resize(slots[chunk], 10)
        slots[chunk].block = source.open(chunk, None)
        memory.keep_unused(chunk)
    memory.drop_unused(20)
    source.header_bytes = 10  # another thread's, a moment later
    memory.make_room(20, {})
    assert memory.reserved == 10
    assert memory.fits_beside_used(30)
    assert not memory.fits_beside_used(31)
    memory.close()


def test_a_chunk_released_while_in_flight_is_kept_once_it_is_there():
    source = FakeSource([10], held=frozenset([0]))
    reader = make_reader(source, 100, keeps_unused=True)
    reader.request([0])
    wait_until(lambda: source.loads == [0], "the chunk was not fetched")
    reader.release([0])
    source.gate.set()
    wait_until(lambda: reader.levels().resident_chunks == 1, "the chunk was dropped")
    reader.request([0])
    assert [chunk for chunk, _ in reader.take([0])] == [0]
    assert source.loads == [0]
    close(reader)


def test_requests_are_needed_until_all_chunks_are_asked_for_or_the_threads_have_enough_to_do():
    source = FakeSource([1] * 40, held=frozenset([0, 1]))
    reader = make_reader(source, 1000, threads=2)
    assert reader.needs_requests
    reader.request(range(17))
    wait_until(lambda: len(source.loads) == 2, "both threads fetch")
    assert reader.needs_requests  # 15 wait, of 8 for each thread
    reader.request([17])
    assert not reader.needs_requests
    source.gate.set()
    list(reader.take(range(18)))
    assert reader.needs_requests
    reader.request(range(18, 40))
    list(reader.take(range(18, 40)))
    assert not reader.needs_requests
    close(reader)
