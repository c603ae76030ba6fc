"""A shard's header is opened once by whoever is first, forgotten on request or where memory is short, and never kept
when opening failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, cast

import pytest

from penstock.loader.counters import Counters
from penstock.loader.errors import FormatError
from penstock.loader.formats.shard import ShardFormat
from penstock.loader.reading.layouts import ENTRY_BYTES, HeaderCache
from penstock.storage import ObjectInfo
from penstock.storage.memory_store import MemoryStore

SHARDS = [ObjectInfo(f"shard-{number}.parquet", 100, f"etag{number}") for number in range(5)]
TIMEOUT_S = 60.0


@dataclass(frozen=True)
class FakeHeader:
    """What a format keeps of a shard; tests give it the size that they need."""

    text: str
    nbytes: int = 1000


class CountingFormat:
    """Only what the cache calls: ``open_shard`` returns a fresh header and counts; ``during`` runs inside of it."""

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()
        self.during: Callable[[str], None] = lambda key: None
        self.nbytes = 1000
        self._lock = threading.Lock()

    def open_shard(self, store: object, shard: ObjectInfo) -> Any:
        with self._lock:
            self.opened[shard.key] += 1
            header = FakeHeader(f"{shard.key} opened for time {self.opened[shard.key]}", self.nbytes)
        self.during(shard.key)
        return header


@pytest.fixture
def counting() -> CountingFormat:
    return CountingFormat()


@pytest.fixture
def headers(counting: CountingFormat) -> HeaderCache:
    return make_cache(counting, 1 << 20)


def make_cache(counting: CountingFormat, budget_bytes: int, counters: Counters | None = None) -> HeaderCache:
    store = MemoryStore("mem://headers/data")
    return HeaderCache(cast(ShardFormat, counting), store, counters or Counters(), budget_bytes=budget_bytes)


def test_many_threads_open_each_shard_once(counting: CountingFormat, headers: HeaderCache) -> None:
    ready = threading.Barrier(16, timeout=TIMEOUT_S)

    def read_all(number: int) -> list[Any]:
        ready.wait()
        return [headers.get(SHARDS[(number + step) % len(SHARDS)]) for step in range(len(SHARDS))]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(read_all, range(16)))
    assert counting.opened == {shard.key: 1 for shard in SHARDS}
    assert {header.text for of_thread in found for header in of_thread} == {
        f"{shard.key} opened for time 1" for shard in SHARDS
    }


def test_a_shard_that_is_slow_to_open_keeps_no_other_waiting(counting: CountingFormat, headers: HeaderCache) -> None:
    opening, may_end = threading.Event(), threading.Event()

    def wait_in_first(key: str) -> None:
        if key == SHARDS[0].key:
            opening.set()
            assert may_end.wait(TIMEOUT_S)

    counting.during = wait_in_first
    with ThreadPoolExecutor(1) as pool:
        slow = pool.submit(headers.get, SHARDS[0])
        assert opening.wait(TIMEOUT_S)
        assert headers.get(SHARDS[1]).text == f"{SHARDS[1].key} opened for time 1"
        assert not slow.done()
        may_end.set()
        assert slow.result(TIMEOUT_S).text == f"{SHARDS[0].key} opened for time 1"


def test_a_header_that_is_none_is_kept_too(counting: CountingFormat, headers: HeaderCache) -> None:
    calls: list[ObjectInfo] = []
    counting.open_shard = lambda store, shard: calls.append(shard)  # type: ignore[method-assign]
    assert headers.get(SHARDS[0]) is None
    assert headers.get(SHARDS[0]) is None
    assert len(calls) == 1


def test_a_failed_open_is_not_kept(counting: CountingFormat, headers: HeaderCache) -> None:
    def fail_once(key: str) -> None:
        if counting.opened[key] == 1:
            raise FormatError(key, "damaged")

    counting.during = fail_once
    with pytest.raises(FormatError, match="damaged"):
        headers.get(SHARDS[0])
    assert headers.get(SHARDS[0]).text == f"{SHARDS[0].key} opened for time 2"
    assert headers.get(SHARDS[0]).text == f"{SHARDS[0].key} opened for time 2"


def test_a_thread_that_waited_for_a_failing_one_opens_the_shard_itself(
    counting: CountingFormat, headers: HeaderCache
) -> None:
    opening, may_fail = threading.Event(), threading.Event()

    def fail_first(key: str) -> None:
        if counting.opened[key] == 1:
            opening.set()
            assert may_fail.wait(TIMEOUT_S)
            raise FormatError(key, "damaged")

    counting.during = fail_first
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(headers.get, SHARDS[0])
        assert opening.wait(TIMEOUT_S)
        second = pool.submit(headers.get, SHARDS[0])
        may_fail.set()
        with pytest.raises(FormatError, match="damaged"):
            first.result(TIMEOUT_S)
        assert second.result(TIMEOUT_S).text == f"{SHARDS[0].key} opened for time 2"


def test_a_forgotten_shard_is_opened_again_and_the_others_are_not(
    counting: CountingFormat, headers: HeaderCache
) -> None:
    for shard in SHARDS:
        headers.get(shard)
    headers.forget(SHARDS[2])
    headers.forget(SHARDS[2])
    for shard in SHARDS:
        headers.get(shard)
    assert counting.opened == {shard.key: 1 + (shard is SHARDS[2]) for shard in SHARDS}


def test_what_was_forgotten_while_it_was_being_opened_is_not_kept(
    counting: CountingFormat, headers: HeaderCache
) -> None:
    opening, may_end = threading.Event(), threading.Event()

    def wait_in_first(key: str) -> None:
        if counting.opened[key] == 1:
            opening.set()
            assert may_end.wait(TIMEOUT_S)

    counting.during = wait_in_first
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(headers.get, SHARDS[0])
        assert opening.wait(TIMEOUT_S)
        headers.forget(SHARDS[0])  # does not wait for the other thread
        assert headers.get(SHARDS[0]).text == f"{SHARDS[0].key} opened for time 2"
        may_end.set()
        assert loading.result(TIMEOUT_S).text == f"{SHARDS[0].key} opened for time 1"
    assert headers.get(SHARDS[0]).text == f"{SHARDS[0].key} opened for time 2"


def test_headers_beyond_the_budget_are_dropped_the_longest_unused_first(counting: CountingFormat) -> None:
    counters = Counters()
    headers = make_cache(counting, 3 * (counting.nbytes + ENTRY_BYTES), counters)
    for number in (0, 1, 2, 0, 3):  # 1 was unused for longest when 3 came
        headers.get(SHARDS[number])
    assert headers.nbytes == 3 * (counting.nbytes + ENTRY_BYTES)
    assert counters.totals().evicted_headers == 1
    for number in (0, 2, 3):
        headers.get(SHARDS[number])
    assert counting.opened == {SHARDS[number].key: 1 for number in range(4)}
    headers.get(SHARDS[1])
    assert counting.opened[SHARDS[1].key] == 2
    assert counters.totals().evicted_headers == 2


def test_many_shards_read_by_many_threads_stay_inside_the_budget(counting: CountingFormat) -> None:
    budget = 50 * (counting.nbytes + ENTRY_BYTES)
    headers = make_cache(counting, budget)
    shards = [ObjectInfo(f"shard-{number}", 100, None) for number in range(500)]
    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(lambda i: (headers.get(shards[i % 500]).text, headers.nbytes), range(2000)))
    assert all(text.startswith(f"{shards[i % 500].key} opened") for i, (text, _) in enumerate(found))
    assert max(nbytes for _, nbytes in found) <= budget


def test_one_header_larger_than_the_budget_is_kept_until_the_next_one_comes(counting: CountingFormat) -> None:
    headers = make_cache(counting, 100)
    for number in (0, 0, 1, 1, 0):
        headers.get(SHARDS[number])
    assert counting.opened == {SHARDS[0].key: 2, SHARDS[1].key: 1}
    assert headers.nbytes == counting.nbytes + ENTRY_BYTES


def test_shards_that_keep_nothing_are_bounded_too(counting: CountingFormat) -> None:
    counting.open_shard = lambda store, shard: None  # type: ignore[method-assign]
    headers = make_cache(counting, 10 * ENTRY_BYTES)
    for number in range(1000):
        headers.get(ObjectInfo(f"shard-{number}", 100, None))
    assert headers.nbytes == 10 * ENTRY_BYTES


def test_a_smaller_budget_drops_headers_at_once(counting: CountingFormat) -> None:
    headers = make_cache(counting, 1 << 20)
    for shard in SHARDS:
        headers.get(shard)
    headers.limit(2 * (counting.nbytes + ENTRY_BYTES))
    assert headers.nbytes == 2 * (counting.nbytes + ENTRY_BYTES)
    headers.get(SHARDS[4])
    assert counting.opened[SHARDS[4].key] == 1


def test_a_forgotten_header_frees_its_bytes(counting: CountingFormat, headers: HeaderCache) -> None:
    headers.get(SHARDS[0])
    headers.forget(SHARDS[0])
    headers.forget(SHARDS[1])
    assert headers.nbytes == 0
