"""Real processes of a node share how many requests to a host run."""

from __future__ import annotations

import http.server
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path

import pytest
from started_process import started_process

from penstock.storage.retrying.limiter import open_budget


class Counting(http.server.BaseHTTPRequestHandler):
    """Answers every GET after a while, and counts those that wait; paths with 'hang' wait until they may go."""

    protocol_version = "HTTP/1.1"
    lock = threading.Lock()
    running = most = 0
    busy_beyond = 1000
    hanging = threading.Semaphore(0)
    go_on = threading.Event()
    begun: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        cls = type(self)
        with cls.lock:
            cls.running += 1
            cls.most = max(cls.most, cls.running)
            cls.begun.append(self.path)
        if "hang" in self.path:
            cls.hanging.release()
            cls.go_on.wait(60)
        else:
            cls.go_on.wait(0.02)
        with cls.lock:
            is_busy = cls.running > cls.busy_beyond
            cls.running -= 1
        if is_busy:
            self.send_response(503)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206)
        for name, value in [("ETag", '"1"'), ("Content-Range", "bytes 0-3/4"), ("Content-Length", "4")]:
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(b"data")


@pytest.fixture
def counting() -> Iterator[tuple[str, type[Counting]]]:
    class Handler(Counting):
        running = most = 0
        hanging = threading.Semaphore(0)
        go_on = threading.Event()

    Handler.begun = []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.handle_error = lambda *_: None  # type: ignore[method-assign] - a killed client breaks its connections
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", Handler
    finally:
        Handler.go_on.set()
        server.shutdown()
        thread.join()
        server.server_close()


CLIENT = """
import sys
from concurrent.futures import ThreadPoolExecutor
from penstock.storage import ByteRange, RetryConfig, open_store
url, key, threads, requests = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
store = open_store(url, retry=RetryConfig(hedge_share=0, idle_timeout_s=100, deadline_s=200))
with ThreadPoolExecutor(threads) as pool:
    for data in pool.map(lambda _: bytes(store.get(key, ByteRange(0, 4))), range(requests)):
        assert data == b"data"
"""


def start_client(
    url: str, key: str, *, threads: int, requests: int, folder: Path, places: int
) -> AbstractContextManager[subprocess.Popen[str]]:
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(folder), "PENSTOCK_NODE_REQUESTS": str(places)}
    command = [sys.executable, "-c", CLIENT, url, key, str(threads), str(requests)]
    return started_process(command, env=environment)


@pytest.mark.slow
@pytest.mark.parametrize("places", [6, 0])
def test_four_processes_send_no_more_requests_at_once_than_their_node_may(
    tmp_path: Path, counting: tuple[str, type[Counting]], places: int
) -> None:
    url, handler = counting
    with ExitStack() as stack:
        started = (start_client(url, "x", threads=12, requests=60, folder=tmp_path, places=places) for _ in range(4))
        clients = [stack.enter_context(client) for client in started]
        assert [client.wait(120) for client in clients] == [0] * 4
    assert len(handler.begun) == 240
    assert handler.most <= 6 if places else handler.most > 6  # switched off, each has its own limit


@pytest.mark.slow
def test_a_killed_process_frees_its_places(tmp_path: Path, counting: tuple[str, type[Counting]]) -> None:
    url, handler = counting
    with start_client(url, "hang", threads=3, requests=3, folder=tmp_path, places=3) as hung:
        for _ in range(3):
            assert handler.hanging.acquire(timeout=60)
        with start_client(url, "x", threads=3, requests=30, folder=tmp_path, places=3) as other:
            with pytest.raises(subprocess.TimeoutExpired):
                other.wait(2)
            assert "/x" not in handler.begun
            hung.send_signal(signal.SIGKILL)
            hung.wait(60)
            assert other.wait(60) == 0
    assert handler.begun.count("/x") == 30


@pytest.mark.slow
def test_a_server_that_throttles_one_process_has_fewer_requests_from_all_that_follow(
    tmp_path: Path, counting: tuple[str, type[Counting]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = counting
    handler.busy_beyond = 4
    with start_client(url, "x", threads=16, requests=60, folder=tmp_path, places=16) as client:
        assert client.wait(120) == 0
    assert len(handler.begun) > 60  # some were sent again
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    budget = open_budget(url, 16)
    assert budget is not None
    assert budget.limit < 16
