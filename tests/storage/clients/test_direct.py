"""Ranges that are received without obstore: which stores do so, and what servers may do to their connections."""

from __future__ import annotations

import gc
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from queue import Queue
from typing import Any

import pytest
from obstore.store import from_url
from scripted_server import DATA, PROXIES, S3, Last, answer, part, serving

from penstock.storage import (
    AccessDeniedError,
    ByteRange,
    NotFoundError,
    ObjectChangedError,
    ShortReadError,
    StorageError,
    StoreTimeoutError,
    StoreUnavailableError,
    ThrottledError,
    open_client,
)
from penstock.storage.clients import direct
from penstock.storage.clients import shared as clients
from penstock.storage.retrying.adaptive_timeout import TimedStore, TimeLimit


@pytest.fixture(autouse=True)
def _no_proxies(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PROXIES:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("url", "options", "environment", "reason"),
    [
        ("s3://bucket/x", S3, {}, None),
        ("s3://bucket/x", {**S3, "token": "session", "timeout": "1min", "request_payer": True}, {}, None),
        ("http://host/x", {"direct_reads": None}, {}, None),
        ("http://host/x", {}, {"http_proxy": "http://proxy:1", "no_proxy": "host"}, None),
        ("s3://bucket/x", {**S3, "direct_reads": False}, {}, "direct_reads=False"),
        ("http://host/x", {"direct_reads": False}, {}, "direct_reads=False"),
        ("s3://bucket/x", {}, {}, "https"),
        ("s3://bucket/x", {**S3, "endpoint": "https://s3.example.org"}, {}, "https"),
        ("https://host/x", {}, {}, "https"),
        ("gs://bucket/x", {"skip_signature": True}, {}, "gs"),
        ("az://container/x", {"account_name": "a", "account_key": "a2V5"}, {}, "az"),
        ("s3://bucket/x", {**S3, "anonymous": True}, {}, "skip_signature"),
        ("s3://bucket--use1-az4--x-s3/x", {**S3, "s3_express": True}, {}, "s3_express"),
        ("s3://bucket/x", {**S3, "default_headers": {"x-a": "b"}}, {}, "default_headers"),
        ("http://host/x", {"default_headers": {"x-a": "b"}}, {}, "default_headers"),
        ("s3://bucket/x", {**S3, "proxy_url": "http://proxy:1"}, {}, "proxy_url"),
        ("s3://bucket/x", S3, {"HTTP_PROXY": "http://proxy:1"}, "a proxy"),
        ("http://host/x", {}, {"ALL_PROXY": "http://proxy:1"}, "a proxy"),
        ("s3://bucket/x", S3, {"AWS_SKIP_SIGNATURE": "true"}, "AWS_SKIP_SIGNATURE"),
        ("s3://bucket/x", S3, {"AWS_SSE_CUSTOMER_KEY_BASE64": "a2V5"}, "AWS_SSE_CUSTOMER_KEY_BASE64"),
    ],
)
def test_a_store_says_whether_it_reads_ranges_directly_and_what_keeps_it_from_that(
    url: str,
    options: dict[str, Any],
    environment: dict[str, str],
    reason: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with closing(open_client(url, options)) as store:
        told = "direct" if reason is None else f"by obstore ({reason})"
        assert repr(store) == f"RemoteStore({url!r}, ranges={told!r})"


def test_ranges_come_over_one_warm_connection_and_whole_objects_by_obstore() -> None:
    with serving(part) as server, closing(open_client(server.url)) as store:
        for start, stop in ((0, 1), (5, 10_000), (10_239, 10_240)):
            assert store.get("a b/ü?.tar", ByteRange(start, stop), etag="one") == DATA[start:stop]
    assert server.connections == 1
    assert {head.splitlines()[0] for head in server.heads} == {"GET /a%20b/%C3%BC%3F.tar HTTP/1.1"}
    assert all('If-Match: "one"' in head and "User-Agent: penstock" in head for head in server.heads)


def test_time_limits_cost_no_client_where_ranges_are_read_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def note(origin: str, **options: Any) -> Any:
        made.append(origin)
        return from_url(origin, **options)

    monkeypatch.setattr(clients, "from_url", note)
    with serving(lambda head: part(head) if "bytes=" in head else answer("404 Not Found")) as server:
        options = {"endpoint": server.url, "access_key": "key", "secret_key": "secret-of-this-test"}
        store = open_client("s3://time-limits/x", options)
        assert isinstance(store, TimedStore)
        for seconds in (12.0, 24.0, 48.0):
            limited = store.within(TimeLimit(seconds, 8.0))
            assert limited.get("a", ByteRange(1, 3)) == DATA[1:3]
        assert made == ["s3://time-limits"]
        with pytest.raises(NotFoundError):
            limited.get("a")  # obstore reads it, within that limit
        assert len(made) == 2
        store.close()
        with pytest.raises(StorageError):
            limited.get("a")
    assert len(made) == 2


def test_a_connection_that_the_server_closed_meanwhile_costs_no_read() -> None:
    closes = iter([False, True, False, True, False])

    def close_now_and_then(head: str) -> bytes:
        return Last() if next(closes) else part(head)

    with serving(close_now_and_then) as server, closing(open_client(server.url)) as store:
        for _ in range(3):
            assert store.get("x", ByteRange(3, 900)) == DATA[3:900]
    assert (len(server.heads), server.connections) == (5, 3)


def test_a_new_connection_that_breaks_is_an_error_for_the_retries_above() -> None:
    with (
        serving(lambda head: Last()) as server,
        closing(open_client(server.url)) as store,
        pytest.raises(StoreUnavailableError, match=r"x\[3:900\]"),
    ):
        store.get("x", ByteRange(3, 900))
    assert len(server.heads) == 1


@pytest.mark.parametrize(
    ("told", "error", "match"),
    [
        (answer("200 OK", DATA), StorageError, "copy the data to a server that answers ranges"),
        (answer("206 Partial Content", DATA[:9]), StorageError, "no valid Content-Range"),
        (answer("206 Partial Content", DATA[:9], "Content-Range: bytes 1-9/10240"), StorageError, "another one"),
        (answer("206 Partial Content", DATA[:5], "Content-Range: bytes 0-4/10240"), StorageError, "another one"),
        (answer("206 Partial Content", DATA[:5], "Content-Range: bytes 0-8/10240"), StorageError, "another one"),
        (answer("206 Partial Content", DATA[:5], "Content-Range: bytes 0-4/5", 'ETag: "one"'), ShortReadError, "of 5"),
        (answer("206 Partial Content", DATA[:9], "Content-Range: bytes 0-8/10240", 'ETag: "two"'),
         ObjectChangedError, "expected ETag one, found two"),
        (answer("412 Precondition Failed"), ObjectChangedError, "has changed"),
        (answer("403 Forbidden", b"<Code>InvalidAccessKeyId</Code>"), AccessDeniedError, "secret is wrong"),
        (answer("503 Slow Down", b"<Code>SlowDown</Code>"), ThrottledError, "503 SlowDown"),
        (answer("429 Too Many Requests"), ThrottledError, "429"),
        (Last(answer("500 Oh", length=100)), StoreUnavailableError, "500"),
        (b"no HTTP at all\r\n\r\n", StoreUnavailableError, "no HTTP"),
        (b"HTTP/1.1 206 OK\r\n" + b"a: b\r\n" * 200 + b"\r\n", StoreUnavailableError, "no HTTP"),
    ],
)  # fmt: skip
def test_answers_that_are_not_what_was_asked_for_are_the_errors_that_obstore_would_give(
    told: bytes, error: type[StorageError], match: str
) -> None:
    with (
        serving(lambda head: told) as server,
        closing(open_client(server.url)) as store,
        pytest.raises(error, match=match) as caught,
    ):
        store.get("x", ByteRange(0, 9), etag="one")
    assert type(caught.value) is error
    assert len(server.heads) == 1


def test_a_body_that_ends_early_is_an_error_and_its_connection_is_not_used_again() -> None:
    whole = part("Range: bytes=0-10239")
    told = iter([Last(whole[:-300]), whole, Last(whole[:-10_000]), whole])
    with serving(lambda head: next(told)) as server, closing(open_client(server.url)) as store:
        for got in (9_940, 240):
            with pytest.raises(StoreUnavailableError, match=f"ended after {got} of 10240 bytes"):
                store.get("x", ByteRange(0, len(DATA)))
            assert store.get("x", ByteRange(0, len(DATA))) == DATA
    assert server.connections == 3


@pytest.mark.parametrize("sent", [0, 50, 9_000])
def test_an_answer_that_stops_is_broken_off(sent: int) -> None:
    with serving(lambda head: part(head)[:sent]) as server:
        options = {"timeout": "20s", "read_timeout": "100ms"}
        with closing(open_client(server.url, options)) as store, pytest.raises(StoreTimeoutError, match="or stopped"):
            store.get("x", ByteRange(0, len(DATA)))


def test_memory_for_an_answer_is_got_ready_while_that_is_on_its_way_unless_the_range_is_vast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: Queue[int] = Queue()

    def take(nbytes: int) -> memoryview:
        taken.put(nbytes)
        return memoryview(bytearray(nbytes))

    def answer_late(head: str) -> bytes:
        if "bytes=0-99" in head:
            assert taken.get(timeout=60) == 100  # before the answer's first byte
            return part(head)
        return answer("416 Range Not Satisfiable")

    monkeypatch.setattr(direct.BUFFERS, "take", take)
    with serving(answer_late) as server, closing(open_client(server.url)) as store:
        assert store.get("x", ByteRange(0, 100)) == DATA[:100]
        with pytest.raises(StorageError):
            store.get("x", ByteRange(0, 1 << 45))
    assert taken.empty()


def test_where_a_server_redirects_obstore_goes_from_then_on() -> None:
    with serving(part) as other:

        def send_on(head: str) -> bytes:
            return answer("302 Found", b"", f"Location: {other.url}/there")

        with serving(send_on) as server, closing(open_client(server.url)) as store:
            for _ in range(2):
                assert store.get("x", ByteRange(2, 8)) == DATA[2:8]
    assert [head.startswith("GET /there ") for head in other.heads] == [True, True]
    assert len(server.heads) == 3  # the first was ours


def test_no_connection_is_lost_to_errors_or_to_the_end_of_the_store() -> None:
    told = {"good": True}

    def answer_or_break(head: str) -> bytes:
        return part(head) if told["good"] else Last(part(head)[:-5])

    with serving(answer_or_break) as server:
        store = open_client(server.url)
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(lambda _: bytes(store.get("x", ByteRange(0, 99))), range(20))) == {DATA[:99]}
        told["good"] = False
        for _ in range(3):
            with pytest.raises(StoreUnavailableError):
                store.get("x", ByteRange(0, 99))
        store.close()
        server.wait_until_left()


def test_the_connections_of_a_store_that_was_dropped_close_without_a_warning() -> None:
    with serving(part) as server:
        store: Any = open_client(server.url)
        assert store.get("x", ByteRange(0, 99)) == DATA[:99]
        store.itself = store  # as stores are in cycles, which the garbage collector ends in any order
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            del store
            gc.collect()
            server.wait_until_left()
    assert [str(warning.message) for warning in told if issubclass(warning.category, ResourceWarning)] == []


@pytest.mark.parametrize("interim", ["102 Processing", "103 Early Hints"])
def test_interim_answers_are_passed_over_and_leave_the_connection_in_step(interim: str) -> None:
    def respond(head: str) -> bytes:
        return f"HTTP/1.1 {interim}\r\nLink: </a>\r\n\r\n".encode() * 2 + part(head)

    with serving(respond) as server, closing(open_client(server.url)) as store:
        for start in (0, 100, 200, 300):
            assert bytes(store.get("a", ByteRange(start, start + 50))) == DATA[start : start + 50]
        assert server.connections == 1


@pytest.mark.parametrize("refusal", ["408 Request Timeout", "425 Too Early", "400 Bad Request", "409 Conflict"])
def test_refusals_that_pass_are_tried_again(refusal: str) -> None:
    code = "OperationAborted" if refusal.startswith("409") else "RequestTimeout"
    body = f"<Error><Code>{code}</Code></Error>".encode()
    with (
        serving(lambda head: Last(answer(refusal, body))) as server,
        closing(open_client(server.url)) as store,
        pytest.raises(StoreUnavailableError),
    ):
        store.get("a", ByteRange(0, 50))


def test_interim_answers_without_end_are_an_error() -> None:
    with (
        serving(lambda head: b"HTTP/1.1 103 Early Hints\r\n\r\n" * 100) as server,
        closing(open_client(server.url)) as store,
        pytest.raises(StoreUnavailableError),
    ):
        store.get("a", ByteRange(0, 50))


def test_a_connection_that_was_idle_too_long_by_a_408_costs_no_read() -> None:
    answered: list[str] = []

    def respond(head: str) -> bytes:
        answered.append(head)
        return Last(answer("408 Request Timeout")) if len(answered) == 2 else part(head)

    with serving(respond) as server, closing(open_client(server.url)) as store:
        assert bytes(store.get("a", ByteRange(0, 50))) == DATA[:50]
        assert bytes(store.get("a", ByteRange(50, 100))) == DATA[50:100]
        assert server.connections == 2
