"""What real sockets do to a reader: a proxy between a store and a real server spoils chosen responses."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from devtools.faults.faults import (
    Answer,
    BlackHole,
    Corrupt,
    Delay,
    Drip,
    Fault,
    Reset,
    Silence,
    Truncate,
)
from devtools.faults.proxy import FaultProxy, Request
from penstock.storage import (
    ByteRange,
    RetryConfig,
    RetryStore,
    Store,
    StoreTimeoutError,
    StoreUnreachableError,
    open_client,
)

DATA = random.Random(0).randbytes(1 << 16)
HALF = len(DATA) // 2
WHOLE = ByteRange(0, len(DATA))
WAIT_S = 60
# One try breaks off after 0.45 s. Without second requests, so that it has to.
SHORT = RetryConfig(idle_timeout_s=0.3, min_bytes_per_s=1e6, first_delay_s=0.01, max_delay_s=0.1, hedge_share=0)

OpenStore = Callable[..., RetryStore]


@pytest.fixture
def proxy(python_url: str) -> Iterator[FaultProxy]:
    with FaultProxy(python_url) as proxy:
        yield proxy


@pytest.fixture
def open_proxied(proxy: FaultProxy, python_url: str) -> Iterator[OpenStore]:
    """Opens stores over one folder with the object 'x', through the proxy."""
    folder = uuid4().hex
    open_client(f"{python_url}/{folder}").put("x", DATA)
    opened: list[RetryStore] = []

    def make(config: RetryConfig = SHORT, **options: Any) -> RetryStore:
        client: Store = open_client(f"{proxy.url}/{folder}", options)
        opened.append(RetryStore(client, config, host=uuid4().hex))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def own_threads(store: RetryStore) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.endswith(store.url)]


def wait_until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.01)


@pytest.mark.parametrize("direct_reads", [True, False])
@pytest.mark.parametrize(
    "fault",
    [
        Drip(bytes_per_s=1000),
        Silence(after_bytes=HALF),
        BlackHole(),
        Delay(seconds=WAIT_S),
        Reset(after_bytes=HALF),
        Truncate(after_bytes=HALF),
        Answer(status=503),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_one_bad_response_costs_one_retry(
    proxy: FaultProxy, open_proxied: OpenStore, fault: Fault, direct_reads: bool
) -> None:
    store = open_proxied(direct_reads=direct_reads)
    proxy.inject(fault, path="/x")
    assert store.get("x", WHOLE) == DATA
    assert (store.counts.requests, store.counts.retries) == (2, 1)


@pytest.mark.parametrize("verb", ["head", "list", "put", "get"])
def test_every_verb_outlives_a_response_that_never_comes(proxy: FaultProxy, open_proxied: OpenStore, verb: str) -> None:
    store = open_proxied()
    calls: dict[str, Callable[[], Any]] = {
        "head": lambda: store.head("x").size,
        "list": lambda: sum(info.size for info in store.list()),
        "put": lambda: store.put("x", DATA).size,
        "get": lambda: len(store.get("x")),
    }
    proxy.inject(BlackHole())
    assert calls[verb]() == len(DATA)
    assert store.counts.retries == 1


def test_corrupt_bytes_have_the_right_length(proxy: FaultProxy, open_proxied: OpenStore) -> None:
    proxy.inject(Corrupt(after_bytes=HALF), path="/x")
    data = open_proxied().get("x", WHOLE)
    assert data[:HALF] == DATA[:HALF]
    assert all(a != b for a, b in zip(data[HALF:], DATA[HALF:], strict=True))


def test_a_drip_before_any_latency_is_known_is_overtaken_by_a_second_request(
    proxy: FaultProxy, open_proxied: OpenStore
) -> None:
    store = open_proxied(RetryConfig(idle_timeout_s=4, min_bytes_per_s=1e6))
    proxy.inject(Drip(bytes_per_s=1000), path="/x")
    assert store.get("x", WHOLE) == DATA
    assert (store.counts.hedges_won, store.counts.retries) == (1, 0)


def test_a_host_that_is_slow_as_a_whole_gets_more_time(proxy: FaultProxy, open_proxied: OpenStore) -> None:
    store = open_proxied(RetryConfig(idle_timeout_s=0.15, min_bytes_per_s=1e6, first_delay_s=0.01, hedge_share=0))
    proxy.choose(lambda request: Drip(bytes_per_s=2 * len(DATA)))  # half a second: twice what the first try may take
    for _ in range(2):
        assert store.get("x", WHOLE) == DATA
    first = store.counts.retries
    assert first >= 2
    for _ in range(2):
        assert store.get("x", WHOLE) == DATA
    assert store.counts.retries <= 2 * first


def test_a_response_that_is_always_too_slow_is_an_error_that_says_so(
    proxy: FaultProxy, open_proxied: OpenStore
) -> None:
    store = open_proxied(RetryConfig(deadline_s=1, idle_timeout_s=0.1, hedge_share=0))
    proxy.choose(lambda request: BlackHole())
    with pytest.raises(StoreTimeoutError, match=r"too slow, or stopped; tried \d+ times"):
        store.get("x", WHOLE)
    assert store.counts.retries >= 1


def test_a_host_that_refuses_the_first_request_is_not_waited_for(
    proxy: FaultProxy, open_proxied: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.retrying.retry.FIRST_CONTACT_S", 0.2)
    store = open_proxied()
    proxy.pause()
    with pytest.raises(StoreUnreachableError, match=r"[Rr]efused; tried .* never responded before; check the URL"):
        store.get("x", WHOLE)
    with pytest.raises(StoreUnreachableError, match=r"[Rr]efused; tried .* never responded before"):
        store.list()


def test_a_host_that_responded_before_is_waited_for(
    proxy: FaultProxy, open_proxied: OpenStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.storage.retrying.retry.FIRST_CONTACT_S", 0.0)
    store = open_proxied()
    assert store.head("x").size == len(DATA)
    proxy.pause()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(store.get, "x", WHOLE)
        wait_until(lambda: store.counts.retries >= 2)
        proxy.resume()
        assert reading.result(WAIT_S) == DATA


def test_threads_of_requests_that_hang_end_with_their_time(proxy: FaultProxy, open_proxied: OpenStore) -> None:
    store = open_proxied(RetryConfig(idle_timeout_s=4))  # six seconds, and a second request after a quarter of them
    proxy.inject(Drip(bytes_per_s=1000), times=3, path="/x")
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(lambda _: store.get("x", WHOLE), range(3))) == [DATA] * 3
    assert store.limiter.running == 3, "all that dripped are over, and prove nothing"
    hanging = own_threads(store)
    store.close()
    assert len(hanging) >= 3
    wait_until(lambda: own_threads(store) == [])


@pytest.mark.s3
def test_reads_from_s3_are_right_whatever_happens_to_one_response_in_five(
    s3_url: tuple[str, dict[str, Any]],
) -> None:
    url, options = s3_url
    open_client(url, options).put("x", DATA)
    draw = random.Random(1)
    faults: list[Fault] = [Drip(bytes_per_s=500), Silence(after_bytes=100), BlackHole(), Reset(after_bytes=100)]
    faults += [Truncate(after_bytes=100), Answer(status=500), Answer(status=503), Answer(status=429)]

    def choose(request: Request) -> Fault | None:
        return draw.choice(faults) if draw.random() < 0.2 else None

    with FaultProxy(options["endpoint"]) as proxy:
        client = open_client(url, {**options, "endpoint": proxy.url})
        store = RetryStore(client, RetryConfig(idle_timeout_s=0.5, first_delay_s=0.01), host=uuid4().hex)
        etag = store.head("x").etag
        proxy.choose(choose)

        def read(i: int) -> bool:
            return store.get("x", ByteRange(i, i + 20_000), etag=etag) == DATA[i : i + 20_000]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(150)))
        store.close()
