"""Stores of one bucket or host share a client: a second one finds the connections of the first."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from penstock.storage import open_store


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    connections = 0


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: _Server

    def setup(self) -> None:
        super().setup()
        self.server.connections += 1

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", "7")
        self.send_header("ETag", '"one"')
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        serving.start()
        yield server
        server.shutdown()


def _options(server: _Server, **others: str) -> dict[str, str]:
    endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    return {"endpoint": endpoint, "access_key": "test", "secret_key": "testsecret", "region": "us-east-1", **others}


def test_stores_find_the_connections_of_another_one_of_their_bucket_as_long_as_that_is_open(server: _Server) -> None:
    first = open_store("s3://bucket/train", storage_options=_options(server))
    assert first.head("a").size == 7
    for number in range(20):
        other = open_store(f"s3://bucket/train/{number}", storage_options=_options(server))
        assert other.head("b").etag == "one"
        other.close()
    first.close()
    assert server.connections <= 10  # one, but for requests that come before the last one's is given back


@pytest.mark.parametrize("others", [{"secret_key": "another"}, {"timeout": "7s"}])
def test_stores_with_other_options_share_nothing(server: _Server, others: dict[str, str]) -> None:
    first = open_store("s3://bucket/train", storage_options=_options(server))
    second = open_store("s3://bucket/train", storage_options=_options(server, **others))
    first.head("a"), second.head("a")
    assert server.connections >= 2
    first.close()
    second.close()


def test_stores_made_in_another_environment_share_nothing(server: _Server, monkeypatch: pytest.MonkeyPatch) -> None:
    options = _options(server)
    del options["access_key"], options["secret_key"]
    stores = []
    for key in ("one", "two"):
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", key)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        stores.append(open_store("s3://bucket/train", storage_options=options))
        stores[-1].head("a")
    assert server.connections >= 2
    for store in stores:
        store.close()
