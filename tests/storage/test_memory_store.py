"""The shipped fake does what a test orders."""

from __future__ import annotations

import time

import pytest

from penstock.storage import ByteRange, Call, Fault, MemoryStore, NotFoundError, ShortReadError, StoreUnavailableError


def test_a_url_reaches_the_same_objects_anywhere_in_the_process(memory_url: str) -> None:
    MemoryStore(memory_url + "/a/b").put("x", b"1")
    assert MemoryStore(memory_url).get("a/b/x") == b"1"
    assert [info.key for info in MemoryStore(memory_url + "/a").list()] == ["b/x"]
    MemoryStore(memory_url).drop()
    with pytest.raises(NotFoundError, match="bucket"):
        MemoryStore(memory_url).list()


def test_anonymous_buckets_are_apart() -> None:
    one, two = MemoryStore(), MemoryStore()
    one.put("x", b"1")
    assert list(two.list()) == []


def test_latency_and_bandwidth_take_their_time() -> None:
    store = MemoryStore()
    store.put("x", bytes(1000))
    store.slow_down(latency_s=0.02, bytes_per_s=50_000)
    started = time.monotonic()
    store.get("x")
    assert 0.04 <= time.monotonic() - started < 30
    store.slow_down()


def test_faults_befall_requests_in_the_order_they_were_injected() -> None:
    store = MemoryStore()
    store.put("x", b"12345")
    store.inject(Fault(error=StoreUnavailableError))
    store.inject(Fault(keep_bytes=2))
    with pytest.raises(StoreUnavailableError):
        store.get("x")
    with pytest.raises(ShortReadError, match="wanted 5 bytes, got 2"):
        store.get("x")
    assert store.get("x") == b"12345"


def test_every_call_is_on_record() -> None:
    store = MemoryStore()
    store.put("x", b"12345")
    store.get("x", ByteRange(1, 2))
    store.head("x")
    assert store.calls == [Call("put", "x"), Call("get", "x", ByteRange(1, 2)), Call("head", "x")]


def test_orders_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        Fault(delay_s=-1)
    with pytest.raises(ValueError, match="verb"):
        MemoryStore().inject(Fault(), verb="copy")
    with pytest.raises(ValueError, match="slow_down"):
        MemoryStore().slow_down(bytes_per_s=0)
