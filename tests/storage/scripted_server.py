"""A server of one host that answers as it is told, and stores that read from it directly."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress

DATA = bytes(range(256)) * 40
S3 = {"endpoint": "http://s3.example.org:9000", "access_key": "key", "secret_key": "secret-of-the-tests"}

PROXIES = ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY", "no_proxy", "NO_PROXY")


class Last(bytes):
    """An answer after which the connection is closed."""


# One request's head in, the bytes to answer out.
Answerer = Callable[[str], bytes]


def answer(status: str, body: bytes = b"", *headers: str, length: int | None = None) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body) if length is None else length}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def part(head: str, *headers: str) -> bytes:
    """What a server answers that has DATA under every name."""
    span = next(line for line in head.splitlines() if line.lower().startswith("range:")).partition("=")[2]
    start, stop = int(span.partition("-")[0]), int(span.partition("-")[2]) + 1
    told = f"Content-Range: bytes {start}-{stop - 1}/{len(DATA)}"
    return answer("206 Partial Content", DATA[start:stop], told, 'ETag: "one"', *headers)


class Server:
    """Answers one request after another on each connection. ``heads``: the requests' heads."""

    def __init__(self, answerer: Answerer) -> None:
        self.answerer = answerer
        self.heads: list[str] = []
        self.connections = 0
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self._serving: list[threading.Thread] = []
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection = self._listening.accept()[0]
            except OSError:
                return
            self.connections += 1
            self._open.append(connection)
            self._serving.append(threading.Thread(target=self._serve, args=(connection,), daemon=True))
            self._serving[-1].start()

    def _serve(self, connection: socket.socket) -> None:
        with suppress(OSError), connection, connection.makefile("rb") as lines:
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    line = lines.readline()
                    if not line:
                        return
                    head += line
                self.heads.append(head.decode())
                told = self.answerer(self.heads[-1])
                connection.sendall(told)
                if isinstance(told, Last):
                    return

    def wait_until_left(self) -> None:
        """Wait until every connection was closed from the other side."""
        for thread in self._serving:
            thread.join(30)
            assert not thread.is_alive()

    def close(self) -> None:
        self._listening.close()
        for connection in self._open:
            connection.close()


@contextmanager
def serving(answerer: Answerer) -> Iterator[Server]:
    with closing(Server(answerer)) as server:
        yield server
