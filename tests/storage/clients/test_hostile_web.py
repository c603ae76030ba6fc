"""Servers that redirect, that make up folders for ever, that are not who they say; and options that would crash."""

from __future__ import annotations

import http.server
import shutil
import ssl
import subprocess
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from devtools.faults.faults import Answer, Drip
from devtools.faults.proxy import FaultProxy
from penstock import DistributedDataLoader
from penstock.storage import (
    ByteRange,
    RetryConfig,
    StorageError,
    Store,
    StoreUnavailableError,
    StoreUnreachableError,
    UnsupportedURLError,
    open_client,
    open_store,
    split_url,
)

SECRET = "sEcReT-kEy-0123456789abcdef"
HEADERS = {"default_headers": {"Authorization": f"Bearer {SECRET}", "X-Api-Key": SECRET, "Cookie": SECRET}}
NAMES = {"authorization", "x-api-key", "cookie"}
ASKS: dict[str, Callable[[Store], Any]] = {
    "get": lambda store: bytes(store.get("x", ByteRange(1, 4))),
    "get whole": lambda store: bytes(store.get("x")),
    "head": lambda store: store.head("x").size,
    "list": lambda store: [info.key for info in store.list()],
}


@pytest.fixture
def folder(python_url: str) -> str:
    """A folder with one object on a server, by its name."""
    name = uuid4().hex
    open_client(f"{python_url}/{name}").put("x", b"12345")
    return name


@pytest.fixture
def own(python_url: str) -> Iterator[FaultProxy]:
    with FaultProxy(python_url) as proxy:
        yield proxy


@pytest.fixture
def other(python_url: str) -> Iterator[FaultProxy]:
    with FaultProxy(python_url) as proxy:
        yield proxy


def redirect(to: str) -> Answer:
    return Answer(status=302, headers=(("Location", to),))


def test_a_cloud_that_redirects_elsewhere_takes_no_signature_and_no_key_along(
    own: FaultProxy, other: FaultProxy, folder: str
) -> None:
    """But a session token, and headers by other names than Authorization and Cookie: docs/security.md says so."""
    other.choose(lambda request: Answer(status=404))
    own.choose(lambda request: redirect(other.url.replace("127.0.0.1", "localhost") + request.path))
    options = {"endpoint": own.url, "access_key": "AKIDofTheTests", "secret_key": SECRET, "token": "session"}
    options["default_headers"] = {"cookie": SECRET, "x-plain": "plain"}
    with pytest.raises(StorageError):
        open_client("s3://bucket", options).get("x", ByteRange(1, 4))
    assert {"authorization", "x-amz-security-token", "cookie"} <= set(own.requests[0].headers)
    taken = other.requests[0].headers
    assert SECRET not in str(other.requests)
    assert "AKIDofTheTests" not in str(other.requests)
    assert {"x-amz-security-token", "x-plain"} == {"authorization", "cookie", "x-amz-security-token", "x-plain"} & set(
        taken
    )


@pytest.mark.parametrize("verb", ASKS)
def test_what_the_user_sends_to_one_server_goes_to_no_other(
    own: FaultProxy, other: FaultProxy, folder: str, verb: str
) -> None:
    own.choose(lambda request: redirect(other.url + request.path))
    store = open_store(f"{own.url}/{folder}", storage_options=HEADERS)
    assert ASKS[verb](store) == {"get": b"234", "get whole": b"12345", "head": 5, "list": ["x"]}[verb]
    assert other.requests
    assert own.requests
    for request in own.requests:
        assert set(request.headers) >= NAMES
    for request in other.requests:
        assert not set(request.headers) & NAMES
        assert SECRET not in str(request)


def test_a_redirect_on_one_server_keeps_the_headers_but_not_one_that_comes_from_outside(
    own: FaultProxy, other: FaultProxy, folder: str
) -> None:
    store = open_store(f"{own.url}/{folder}", storage_options=HEADERS)
    own.inject(redirect(f"/{folder}/x?copy"))
    assert store.head("x").size == 5
    assert set(own.requests[-1].headers) >= NAMES
    own.inject(redirect(f"{other.url}/{folder}/x"))
    other.inject(redirect(f"{own.url}/{folder}/x?secrets-of-another-user"))
    assert store.head("x").size == 5
    assert not set(own.requests[-1].headers) & NAMES


@pytest.mark.parametrize("target", ["ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_a_redirect_to_what_is_no_web_server_is_refused(own: FaultProxy, folder: str, target: str) -> None:
    own.choose(lambda request: redirect(target))
    store = open_store(f"{own.url}/{folder}", storage_options=HEADERS)
    with pytest.raises(UnsupportedURLError, match=r"redirects a HEAD to .*give the URL of that host"):
        store.head("x")


def test_data_are_not_sent_to_another_server_and_redirects_have_an_end(
    own: FaultProxy, other: FaultProxy, folder: str
) -> None:
    store = open_store(f"{own.url}/{folder}", storage_options=HEADERS)
    own.inject(redirect(f"{other.url}/{folder}/y"))
    with pytest.raises(UnsupportedURLError, match="redirects a PUT"):
        store.put("y", b"data")
    assert other.requests == []
    own.choose(lambda request: redirect(request.path))
    with pytest.raises(StorageError, match="redirects more than 5 times"):
        store.head("x")
    assert len(own.requests) < 10


def index_page(names: list[str]) -> Answer:
    links = "".join(f'<a href="{name}">{name}</a>' for name in names)
    return Answer(status=200, body=f"<html><title>Index of /</title>{links}</html>".encode())


@pytest.mark.parametrize(
    ("names", "bounds"),
    [
        (["deeper/"], {}),
        (["a/", "b/"], {"MAX_FOLDERS": 50}),
        ([f"{i}.tar" for i in range(10)] + ["a/"], {"MAX_FILES": 50}),
    ],
)
def test_index_pages_without_end_are_refused(
    own: FaultProxy, names: list[str], bounds: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in bounds.items():
        monkeypatch.setattr(f"penstock.storage.clients.autoindex.{name}", value)
    own.choose(lambda request: index_page(names))
    with pytest.raises(UnsupportedURLError, match=r"go deeper than .* give a folder further down, a brace pattern"):
        open_store(f"{own.url}/x").list()
    assert len(own.requests) < 100


def test_one_index_page_without_end_is_refused(own: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.storage.clients.web.MAX_PAGE_BYTES", 100_000)
    own.choose(lambda request: index_page(["x" * 100] * 10_000))
    with pytest.raises(UnsupportedURLError, match="the index page is longer than"):
        open_store(f"{own.url}/x").list()
    assert len(own.requests) == 1


def test_an_index_page_that_drips_is_given_up(own: FaultProxy, folder: str) -> None:
    own.choose(lambda request: Drip(bytes_per_s=20))
    config = RetryConfig(deadline_s=0.5, idle_timeout_s=0.3, min_bytes_per_s=1e9)
    with pytest.raises(StoreUnavailableError, match="too slow"):
        open_store(f"{own.url}/{folder}", retry=config).list()


@pytest.fixture
def tls_url(tmp_path: Path) -> Iterator[str]:
    """A web server whose certificate nobody signed, with one object 'x'."""
    if not shutil.which("openssl"):
        pytest.skip("openssl is not installed: no certificate can be made")
    (tmp_path / "www").mkdir()
    (tmp_path / "www" / "x").write_bytes(b"12345")
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", "key.pem", "-out", "cert.pem"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args, directory=str(tmp_path / "www"))

        def log_message(self, *_: object) -> None:
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", tmp_path / "key.pem")
    # The handshake in the connection's own thread: one that breaks it off must not end the server.
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"https://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Unverified HTTPS request")
@pytest.mark.parametrize("headers", [{}, HEADERS])
def test_certificates_are_checked_for_listings_as_for_reads(tls_url: str, headers: dict[str, Any]) -> None:
    for ask in ("head", "list"):
        with pytest.raises(StoreUnavailableError):
            ASKS[ask](open_client(tls_url, headers))
        ASKS[ask](open_client(tls_url, {**headers, "allow_invalid_certificates": True}))


@pytest.mark.parametrize(
    ("url", "options", "said"),
    [
        ("http://127.0.0.1:9/x", {"allow_http": False}, "refuses plain http"),
        ("s3://b", {"endpoint": "http://127.0.0.1:9", "allow_http": False}, "refuses plain http"),
        ("s3://b", {"endpoint": "http://127.0.0.1:9", "allow_http": "false"}, "refuses plain http"),
        ("s3://b", {"endpoint": "minio:9000"}, "with its scheme"),
        ("s3://b", {"endpoint": "minio"}, "with its scheme"),
        ("s3://b", {"endpoint": f"http://me:{SECRET}@minio:9000"}, "under their own names"),
        ("s3://b", {"endpoint": f"http://minio/?X-Amz-Signature={SECRET}"}, "under their own names"),
        ("s3://b", {"token": f"{SECRET}\n"}, "'session_token' holds a line end"),
        ("s3://b", {"access_key": "a", "secret_key": f"{SECRET}\r\n"}, "'secret_access_key' holds a line end"),
        ("az://b", {"account_name": "a", "token": f"{SECRET}\n"}, "holds a line end"),
        ("https://h/x", {"default_headers": {"Authorization": f"Bearer {SECRET}\n"}}, "'default_headers' holds"),
        ("https://h/x", {"default_headers": {"Authorization\n": "x"}}, "'default_headers' holds"),
        ("https://h/x", {"read_timeout": "soon"}, 'parse "soon" as Duration'),
    ],
)
def test_options_that_can_not_work_are_refused_before_a_request(url: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UnsupportedURLError, match=said) as caught:
        open_store(url, storage_options=options)
    assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_token_with_a_line_end_in_the_environment_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", SECRET + "\n")
    with pytest.raises(UnsupportedURLError, match="the environment's AWS_SESSION_TOKEN"):
        open_store("s3://b", storage_options={"endpoint": "http://127.0.0.1:9"})


@pytest.mark.parametrize("tail", [f"a.tar?X-Amz-Signature={SECRET}", f"a.tar?sig={SECRET}/cd", f"?sig={SECRET}"])
def test_a_presigned_url_is_refused_at_once_without_its_signature(tail: str) -> None:
    url = f"https://user:{SECRET}@127.0.0.1:9/x/{tail}"
    for ask in (
        lambda: split_url(url),
        lambda: open_store(url),
        lambda: DistributedDataLoader(url, batch_size=1),
        lambda: DistributedDataLoader([url, url], batch_size=1),
    ):
        with pytest.raises(UnsupportedURLError, match="query") as caught:
            ask()
        assert SECRET not in "".join(traceback.format_exception(caught.value))


def test_a_pattern_on_a_host_that_can_not_be_reached_is_given_up_at_the_first_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.storage.retrying.retry.FIRST_CONTACT_S", 0.1)
    options = {"endpoint": "http://127.0.0.1:9", "anonymous": True}
    with pytest.raises(StoreUnreachableError, match="s3://b/x-: no connection to the host"):
        DistributedDataLoader("s3://b/x-{00..19}.tar", batch_size=1, storage_options=options)
