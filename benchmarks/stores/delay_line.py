"""A TCP proxy in a process of its own that answers late: everything a client sends arrives ``delay_s`` later.

What comes back is spliced from socket to socket inside the kernel, so that the proxy is not what bounds a throughput. A
new connection is late, too, as one over a long line is.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from ..child_arguments import take_arguments

_PIECE_BYTES = 1 << 20


@contextmanager
def delay_line(upstream: str, delay_s: float) -> Iterator[str]:
    """The URL of a proxy in front of ``upstream`` (http://host:port); its process ends with the context.

    Raises:
        ValueError: ``upstream`` is no such URL, or the delay is negative.
    """
    parts = urlsplit(upstream)
    if parts.scheme != "http" or parts.hostname is None or delay_s < 0:
        raise ValueError(f"delay_line({upstream!r}, {delay_s}): needs http://host:port and a delay of 0 or more")
    command = [sys.executable, "-m", __name__, parts.hostname, str(parts.port or 80), str(delay_s)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


def _serve(host: str, port: int, delay_s: float) -> None:
    """Listen, print the port, and relay until standard input ends: with the process that started this one."""
    with socket.create_server(("127.0.0.1", 0), backlog=1024) as server:
        print(server.getsockname()[1], flush=True)
        threading.Thread(target=_accept, args=(server, host, port, delay_s), daemon=True).start()
        sys.stdin.read()


def _accept(server: socket.socket, host: str, port: int, delay_s: float) -> None:
    while True:
        client, _ = server.accept()
        threading.Thread(target=_connect, args=(client, host, port, delay_s), daemon=True).start()


def _connect(client: socket.socket, host: str, port: int, delay_s: float) -> None:
    time.sleep(delay_s)
    with client, suppress(OSError), socket.create_connection((host, port)) as upstream:
        for end in (client, upstream):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        back = threading.Thread(target=_splice, args=(upstream, client), daemon=True)
        back.start()
        while data := client.recv(_PIECE_BYTES):
            time.sleep(delay_s)
            upstream.sendall(data)
        upstream.shutdown(socket.SHUT_WR)
        back.join()


def _splice(source: socket.socket, target: socket.socket) -> None:
    reader, writer = os.pipe()
    try:
        while moved := os.splice(source.fileno(), writer, _PIECE_BYTES):
            while moved:
                moved -= os.splice(reader, target.fileno(), moved)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        with suppress(OSError):
            source.shutdown(socket.SHUT_RDWR)
            target.shutdown(socket.SHUT_RDWR)
    finally:
        os.close(reader)
        os.close(writer)


if __name__ == "__main__":
    upstream_host, upstream_port, late_s = take_arguments("HOST PORT DELAY_S", "python -m devtools delayed")
    _serve(upstream_host, int(upstream_port), float(late_s))
