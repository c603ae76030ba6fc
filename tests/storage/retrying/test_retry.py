"""What is tried again, for how long and how wide."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any
from uuid import uuid4

import pytest

from penstock.storage import (
    AccessDeniedError,
    ByteRange,
    Fault,
    MemoryStore,
    NoCredentialsError,
    NotFoundError,
    ObjectChangedError,
    RetryConfig,
    RetryStore,
    ShortReadError,
    StorageError,
    StoreUnavailableError,
    ThrottledError,
)
from penstock.storage.retrying.hedge import ENOUGH, FIRST_HEDGES, LatencyBook
from penstock.storage.retrying.limiter import COOLDOWN_S, Limiter, limiter_of
from penstock.storage.threads.interruptible import Thread

DATA = bytes(1000)
FAST = RetryConfig(deadline_s=5, first_delay_s=0.001, max_delay_s=0.01)


def _stores(config: RetryConfig = FAST) -> tuple[MemoryStore, RetryStore]:
    memory = MemoryStore()
    memory.put("x", DATA)
    return memory, RetryStore(memory, config, host=uuid4().hex)


def _own_threads(store: RetryStore) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(store.url)]


@pytest.mark.parametrize("error", [StoreUnavailableError, ThrottledError, ShortReadError])
def test_what_may_pass_is_tried_again_until_it_succeeds(error: type[StorageError]) -> None:
    memory, store = _stores()
    memory.inject(Fault(error=error), times=3)
    assert store.get("x") == DATA
    assert store.counts.retries == 3
    assert store.counts.requests == 4


def test_where_no_thread_can_be_started_the_asking_one_reads_and_no_place_is_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def start_none(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    memory, store = _stores()
    memory.put("large", bytes(4 << 20))
    monkeypatch.setattr(Thread, "start", start_none)
    assert store.get("x", ByteRange(0, 100)) == DATA[:100]
    assert store.get_ranges("large", [ByteRange(0, 1), ByteRange(3 << 20, (3 << 20) + 1)]) == [b"\0"] * 2
    assert store.limiter.running == 0


def test_a_short_answer_is_tried_again() -> None:
    memory, store = _stores()
    memory.inject(Fault(keep_bytes=10))
    assert store.get("x", ByteRange(0, 100)) == DATA[:100]


@pytest.mark.parametrize("error", [NotFoundError, AccessDeniedError, ObjectChangedError])
def test_what_can_not_pass_fails_at_once(error: type[StorageError]) -> None:
    memory, store = _stores()
    memory.inject(Fault(error=error), times=9)
    with pytest.raises(error):
        store.get("x")
    assert store.counts.requests == 1


def test_one_refusal_by_a_store_that_gave_before_is_asked_about_again() -> None:
    memory, store = _stores()
    etag = store.head("x").etag
    for error in (AccessDeniedError, NotFoundError):
        memory.inject(Fault(error=error))
        assert store.get("x", ByteRange(0, 100), etag=etag) == DATA[:100]
    assert store.counts.retries == 2


def test_a_service_of_credentials_that_is_away_is_waited_for_where_the_store_gave_before() -> None:
    memory, store = _stores()
    memory.inject(Fault(error=NoCredentialsError))
    with pytest.raises(NoCredentialsError):
        store.get("x")
    assert store.counts.requests == 1
    assert store.get("x", ByteRange(0, 100)) == DATA[:100]
    memory.inject(Fault(error=NoCredentialsError), times=6)
    assert store.get("x", ByteRange(0, 100)) == DATA[:100]


@pytest.mark.parametrize("error", [AccessDeniedError, NotFoundError])
def test_a_refusal_that_stays_is_an_error_after_two_more_tries(error: type[StorageError]) -> None:
    memory, store = _stores()
    etag = store.head("x").etag
    memory.inject(Fault(error=error), times=9)
    with pytest.raises(error):
        store.get("x", etag=etag)
    assert store.counts.requests == 4


def test_an_object_that_nobody_indexed_is_absent_at_once() -> None:
    _, store = _stores()
    assert store.get("x") == DATA
    with pytest.raises(NotFoundError):
        store.get("y")
    assert store.counts.retries == 0


@pytest.mark.parametrize("verb", ["get", "head", "list", "put"])
def test_every_verb_is_tried_again(verb: str) -> None:
    memory, store = _stores()
    memory.inject(Fault(error=StoreUnavailableError), times=2, verb=verb)
    calls: dict[str, Any] = {
        "get": lambda: store.get("x"),
        "head": lambda: store.head("x"),
        "list": lambda: list(store.list()),
        "put": lambda: store.put("x", DATA),
    }
    assert calls[verb]()
    assert store.counts.retries == 2


def test_the_last_error_says_how_often_and_how_long_it_was_tried() -> None:
    memory, store = _stores(RetryConfig(deadline_s=0.5, first_delay_s=0.01, max_delay_s=0.02))
    memory.inject(Fault(error=StoreUnavailableError), times=100_000)
    with pytest.raises(StoreUnavailableError, match=r"tried \d+ times in \d+\.\d s, the deadline is 0.5 s"):
        store.get("x")
    assert store.counts.requests > 2


def test_a_long_wait_is_logged_once_with_url_and_cause(caplog: pytest.LogCaptureFixture) -> None:
    memory, store = _stores(RetryConfig(first_delay_s=0.001, max_delay_s=0.01, warn_after_s=0))
    memory.inject(Fault(error=StoreUnavailableError), times=5)
    assert store.get("x") == DATA
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "(tries: 1) and is retried for up to 120 s: injected fault at mem://" in record.getMessage()


def test_a_short_wait_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    memory, store = _stores()
    memory.inject(Fault(error=StoreUnavailableError), times=5)
    assert store.get("x") == DATA
    assert caplog.records == []


def test_an_object_that_changes_while_it_is_read_is_an_error_not_a_mixture() -> None:
    memory, store = _stores()
    etag = store.head("x").etag
    memory.inject(Fault(change_to=b"another"))
    with pytest.raises(ObjectChangedError, match="has changed"):
        store.get("x", ByteRange(0, 3), etag=etag)


def test_throttling_halves_the_limit_for_every_store_of_the_host_and_success_raises_it_again() -> None:
    host = uuid4().hex
    memory = MemoryStore()
    memory.put("x", DATA)
    config = RetryConfig(deadline_s=5, first_delay_s=0.001, max_running=16)
    first, second = (RetryStore(memory, config, host=host) for _ in range(2))
    memory.inject(Fault(error=ThrottledError))
    first.get("x")
    assert first.counts.throttled == 1
    assert limiter_of(host, 16).limit == 8
    for _ in range(9):
        second.get("x")
    assert limiter_of(host, 16).limit == 9


def test_no_more_requests_run_at_once_than_the_limit_allows() -> None:
    memory, store = _stores(RetryConfig(max_running=3))
    memory.slow_down(latency_s=0.005)
    threads = [threading.Thread(target=store.get, args=("x",)) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.most_running == 3


def test_a_cut_holds_for_a_while_and_never_goes_below_one() -> None:
    now = [0.0]
    limiter = Limiter(8, clock=lambda: now[0])
    limits = []
    for _ in range(6):
        limiter.note_throttled()
        limiter.note_throttled()
        limits.append(limiter.limit)
        now[0] += COOLDOWN_S
    assert limits == [4, 2, 1, 1, 1, 1]


def _learn(store: RetryStore) -> None:
    for _ in range(ENOUGH):
        store.get("x", ByteRange(0, 100))


def test_a_late_request_is_overtaken_by_a_second_one(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, store = _stores(RetryConfig(hedge_share=0.2, hedge_floor_s=0.01))
    for _ in range(ENOUGH):
        store._latencies.add(100, 0.002)
    answer, calls, let_go = memory.get, itertools.count(), threading.Event()

    def answer_the_first_late(*given: Any, **named: Any) -> memoryview:
        if next(calls) == 0:
            let_go.wait(60)
        return answer(*given, **named)

    monkeypatch.setattr(memory, "get", answer_the_first_late)
    assert store.get("x", ByteRange(0, 100)) == DATA[:100]
    assert (store.counts.hedges, store.counts.hedges_won) == (1, 1)
    assert store.counts.requests == 2  # the second one counts, too
    threads = _own_threads(store)
    assert len(threads) == 2
    let_go.set()
    store.close()
    for thread in threads:
        thread.join(60)
    assert _own_threads(store) == []


@pytest.mark.slow
def test_second_requests_stay_within_their_share() -> None:
    memory, store = _stores(RetryConfig(hedge_share=0.1, hedge_floor_s=0.0))
    memory.slow_down(latency_s=0.002)
    _learn(store)
    memory.inject(Fault(delay_s=0.3), times=10)
    for _ in range(10):
        store.get("x", ByteRange(0, 100))
    assert 1 <= store.counts.hedges - store.counts.hedges_won <= FIRST_HEDGES + store.counts.requests * 0.1
    store.close()


def test_without_a_share_no_second_request_and_no_thread_is_ever_made() -> None:
    memory, store = _stores(RetryConfig(hedge_share=0))
    memory.slow_down(latency_s=0.002)
    _learn(store)
    memory.inject(Fault(delay_s=0.1))
    store.get("x", ByteRange(0, 100))
    assert store.counts.hedges == 0
    assert _own_threads(store) == []


def test_far_ranges_are_read_side_by_side_and_an_error_of_one_is_raised() -> None:
    memory = MemoryStore()
    memory.put("big", bytes(9 << 20))
    store = RetryStore(memory, FAST, host=uuid4().hex)
    memory.slow_down(latency_s=0.3)
    ranges = [ByteRange(i << 21, (i << 21) + 9) for i in range(4)]
    assert store.get_ranges("big", ranges) == [bytes(9)] * 4
    assert memory.most_running == 4
    memory.inject(Fault(error=ObjectChangedError))
    with pytest.raises(ObjectChangedError):
        store.get_ranges("big", ranges)
    store.close()
    assert _own_threads(store) == []


def test_closing_midway_ends_the_waits_of_other_threads() -> None:
    memory, store = _stores(RetryConfig(deadline_s=60, first_delay_s=30, max_delay_s=60))
    memory.inject(Fault(error=StoreUnavailableError), times=1000)
    caught: list[Exception] = []

    def read() -> None:
        try:
            store.get("x")
        except StorageError as exc:
            caught.append(exc)

    thread = threading.Thread(target=read)
    thread.start()
    time.sleep(0.05)
    store.close()
    thread.join(60)
    assert not thread.is_alive()
    assert len(caught) == 1


def test_the_p95_is_of_answers_of_about_the_same_size() -> None:
    book = LatencyBook()
    for i in range(100):
        book.add(1000, i / 100)
        book.add(1 << 20, 10.0)
    assert book.p95_s(600) == pytest.approx(0.95)
    assert book.p95_s(1 << 20) == 10.0
    assert book.p95_s(1 << 30) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"deadline_s": -1},
        {"max_running": 0},
        {"hedge_share": 2},
        {"first_delay_s": 9, "max_delay_s": 1},
        {"idle_timeout_s": 0},
        {"min_bytes_per_s": 0},
    ],
)
def test_a_configuration_that_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="needs"):
        RetryConfig(**wrong)
