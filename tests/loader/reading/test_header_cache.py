"""A shard's header is opened once by whoever is first, forgotten on request, and never kept when opening failed."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest

from penstock.loader.errors import FormatError
from penstock.loader.formats.shard import ShardFormat
from penstock.loader.reading.header_cache import HeaderCache
from penstock.storage import ObjectInfo
from penstock.storage.memory import MemoryStore

SHARDS = [ObjectInfo(f"shard-{number}.parquet", 100, f"etag{number}") for number in range(5)]
TIMEOUT_S = 60.0


class CountingFormat:
    """Only what the cache calls: ``open_shard`` returns a fresh header and counts; ``during`` runs inside of it."""

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()
        self.during: Callable[[str], None] = lambda key: None
        self._lock = threading.Lock()

    def open_shard(self, store: object, shard: ObjectInfo) -> Any:
        with self._lock:
            self.opened[shard.key] += 1
            header = f"{shard.key} opened for time {self.opened[shard.key]}"
        self.during(shard.key)
        return header


@pytest.fixture
def counting() -> CountingFormat:
    return CountingFormat()


@pytest.fixture
def headers(counting: CountingFormat) -> HeaderCache:
    return HeaderCache(cast(ShardFormat, counting), MemoryStore("mem://headers/data"))


def test_many_threads_open_each_shard_once(counting: CountingFormat, headers: HeaderCache) -> None:
    ready = threading.Barrier(16, timeout=TIMEOUT_S)

    def read_all(number: int) -> list[Any]:
        ready.wait()
        return [headers.get(SHARDS[(number + step) % len(SHARDS)]) for step in range(len(SHARDS))]

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(read_all, range(16)))
    assert counting.opened == {shard.key: 1 for shard in SHARDS}
    assert {header for of_thread in found for header in of_thread} == {
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
        assert headers.get(SHARDS[1]) == f"{SHARDS[1].key} opened for time 1"
        assert not slow.done()
        may_end.set()
        assert slow.result(TIMEOUT_S) == f"{SHARDS[0].key} opened for time 1"


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
    assert headers.get(SHARDS[0]) == f"{SHARDS[0].key} opened for time 2"
    assert headers.get(SHARDS[0]) == f"{SHARDS[0].key} opened for time 2"


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
        assert second.result(TIMEOUT_S) == f"{SHARDS[0].key} opened for time 2"


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
        assert headers.get(SHARDS[0]) == f"{SHARDS[0].key} opened for time 2"
        may_end.set()
        assert loading.result(TIMEOUT_S) == f"{SHARDS[0].key} opened for time 1"
    assert headers.get(SHARDS[0]) == f"{SHARDS[0].key} opened for time 2"
