"""The chunk reader against a fake source: all is delivered, the budget holds, no count and no thread is left."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from started_threads import started_threads

from penstock.loader.columns import Block, BytesColumn
from penstock.loader.errors import FormatError, LoaderClosedError
from penstock.loader.metrics import Counters
from penstock.loader.reading import chunk_reader
from penstock.loader.reading.chunk_reader import ChunkReader
from penstock.loader.reading.leases import Leases

NextUse = Callable[[Sequence[int]], dict[int, int]]


@dataclass
class FakeSource:
    """Chunks of given sizes that come after a random while; ``failing`` ones raise, ``held`` ones wait for ``gate``.

    Those that are ``shut`` come, and their opening waits for ``gate``.
    """

    sizes: Sequence[int]
    seed: int = 0
    latency_s: float = 0.0
    failing: frozenset[int] = frozenset()
    held: frozenset[int] = frozenset()
    shut: frozenset[int] = frozenset()
    gate: threading.Event = field(default_factory=threading.Event)
    opening: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._lock = threading.Lock()

    header_bytes = 0

    def reserve(self, index: int) -> int:
        return self.sizes[index]

    hold = reserve

    def fetch(self, index: int) -> None:
        with self._lock:
            self.loads.append(index)
            wait_s = self._random.random() * self.latency_s
        if index in self.held:
            assert self.gate.wait(60)
        time.sleep(wait_s)
        if index in self.failing:
            raise FormatError(f"shard-{index}", "broken")

    def open(self, index: int, fetched: None) -> Block:
        with self._lock:
            self.opening.append(index)
        if index in self.shut:
            assert self.gate.wait(60)
        column = BytesColumn(memoryview(bytes(self.sizes[index])), np.array([0]), np.array([1]))
        return Block(1, self.sizes[index], {"raw": column})


def make_reader(
    source: FakeSource,
    budget: int,
    threads: int = 4,
    next_use: NextUse | None = None,
    leases: Leases | None = None,
) -> ChunkReader:
    reader = ChunkReader(
        source,  # type: ignore[arg-type]
        budget_bytes=budget,
        threads=threads,
        next_use=next_use or (lambda chunks: dict.fromkeys(chunks, 0)),
        counters=Counters(),
        leases=leases,
    )
    reader.start()
    return reader


def close(reader: ChunkReader, within_s: float = 60.0) -> None:
    reader.close(time.monotonic() + within_s)


def fetch_threads() -> list[str]:
    return [thread.name for thread in started_threads() if thread.name.startswith("penstock-fetch")]


def wait_until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.001)


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    assert not fetch_threads()


@pytest.mark.parametrize("seed", range(24))
def test_whatever_the_order_all_is_delivered_within_the_budget_and_accounts_end_at_zero(seed):
    draw = random.Random(seed)
    chunks = 40
    sizes = [draw.randint(1, 100) for _ in range(chunks)]
    failing = frozenset(draw.sample(range(chunks), draw.choice([0, 0, 5])))
    source = FakeSource(sizes, seed, latency_s=draw.choice([0.0, 0.001, 0.004]), failing=failing)
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
                    time.sleep(0.001)
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


def test_a_failure_of_a_fetch_thread_itself_is_raised_where_the_chunk_is_waited_for():
    def fail(_: Sequence[int]) -> dict[int, int]:
        raise ZeroDivisionError

    reader = make_reader(FakeSource([10, 10]), 10, next_use=fail)
    reader.request([0, 1])
    assert len(list(reader.take([0]))) == 1  # it is in memory now, and there is no room for another
    with pytest.raises(ZeroDivisionError):
        list(reader.take([1]))
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
