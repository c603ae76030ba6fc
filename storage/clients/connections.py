"""Warm HTTP/1.1 connections to one host, whose bodies are received into memory that the caller gives.

A body is waited for whole, in one call without the GIL (``MSG_WAITALL``): threads that fetch do not take turns with
Python code at every packet. Plain HTTP only: Python's TLS hands out 16 KiB a call, each of them a turn.
"""

from __future__ import annotations

import http.client
import io
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any
from urllib.error import URLError

# What http.client reads at a time of an answer's head; it must not wait for more than the server sends.
_HEAD_BYTES = io.DEFAULT_BUFFER_SIZE
_SHORTEST_WAIT_S = 0.001


@dataclass(frozen=True, slots=True)
class Times:
    """Limits of one request in seconds: to connect, without a byte, and for the whole answer."""

    connect_s: float
    idle_s: float
    total_s: float


class _Socket(socket.socket):
    """A blocking socket whose reads end in time. Mutable state: the limits of the request that runs."""

    _idle_s = 0.0
    _until = 0.0
    _wait_s = -1.0

    def __del__(self) -> None:
        """Close without a warning: idle connections of an unclosed store are no mistake of its user's."""
        self.close()

    def limit(self, idle_s: float, until: float) -> None:
        """Break off reads after ``idle_s`` without a byte, and past ``until`` (monotonic)."""
        self._idle_s, self._until = idle_s, until

    def recv_into(self, buffer: Any, nbytes: int = 0, flags: int = 0) -> int:
        left_s = self._until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the response was too slow")
        self._wait(max(_SHORTEST_WAIT_S, min(self._idle_s, left_s)))
        if len(buffer) > _HEAD_BYTES:
            flags |= socket.MSG_WAITALL
        try:
            return super().recv_into(buffer, nbytes, flags)
        except BlockingIOError as exc:  # how a socket's own time-out shows
            raise TimeoutError("the response was too slow, or stopped") from exc

    def _wait(self, seconds: float) -> None:
        """Set how long a read may take; a read that got some bytes by then returns them."""
        if abs(seconds - self._wait_s) > 0.1 * self._wait_s:
            whole = int(seconds)
            interval = struct.pack("ll", whole, int((seconds - whole) * 1e6))
            self.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, interval)
            self.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, interval)
            self._wait_s = seconds


_MOST_INTERIM = 16


class _Response(http.client.HTTPResponse):
    """Passes over interim answers (RFC 9110, section 15.2), of which http.client knows one alone."""

    def _read_status(self) -> tuple[str, int, str]:
        for _ in range(_MOST_INTERIM):
            version, status, reason = super()._read_status()  # type: ignore[misc]
            if not 102 <= status < 200:
                return version, status, reason
            http.client.parse_headers(self.fp)
        raise http.client.HTTPException("interim answers without end")


class Connection(http.client.HTTPConnection):
    """One connection, for one request at a time. ``used``: it has answered one."""

    response_class = _Response

    def __init__(self, host: str, port: int) -> None:
        super().__init__(host, port)
        self.used = False
        self.idle_since = 0.0
        self._times = Times(0.0, 0.0, 0.0)
        self._until = 0.0

    def connect(self) -> None:
        try:
            # Of text Python would encode the name, by tables that it imports for that.
            host: Any = self.host.encode() if self.host.isascii() else self.host
            made = socket.create_connection((host, self.port), min(self._times.connect_s, self._times.total_s))
        except OSError as exc:
            raise URLError(exc) from None
        made.settimeout(None)
        sock = _Socket(made.family, made.type, made.proto, fileno=made.detach())
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.limit(self._times.idle_s, self._until)
        self.sock = sock

    def send_get(self, target: str, headers: dict[str, str], times: Times, until: float) -> None:
        """Send a GET; ``getresponse`` returns its answer once the head has arrived.

        Raises:
            URLError: no connection could be made.
            OSError, http.client.HTTPException: as sockets and http.client have them.
        """
        self._times, self._until = times, until
        if isinstance(self.sock, _Socket):
            self.sock.limit(times.idle_s, until)
        self.request("GET", target, headers=headers)


class Connections:
    """Idle connections to one host. Mutable state: which there are, under a lock."""

    def __init__(self, host: str, port: int, most_idle: int, idle_s: float) -> None:
        """Keep up to ``most_idle`` of them, each for ``idle_s`` seconds."""
        self._host, self._port = host, port
        self._most_idle, self._idle_s = most_idle, idle_s
        self._lock = threading.Lock()
        self._idle: deque[Connection] = deque()  # those that were used last are at the end
        self._closed = False

    def take(self, *, fresh: bool = False) -> Connection:
        """The connection that was used last, or a new one, which connects when it is first used."""
        with self._lock:
            self._drop_old()
            if self._idle and not fresh:
                return self._idle.pop()
        return Connection(self._host, self._port)

    def give_back(self, connection: Connection) -> None:
        """Keep a connection whose answer was read to its end."""
        connection.used = True
        connection.idle_since = time.monotonic()
        with self._lock:
            self._drop_old()
            if not self._closed and len(self._idle) < self._most_idle:
                self._idle.append(connection)
                return
        connection.close()

    def close(self) -> None:
        """Close what is idle, and what is given back from now on."""
        with self._lock:
            self._closed = True
            while self._idle:
                self._idle.pop().close()

    def _drop_old(self) -> None:
        while self._idle and time.monotonic() - self._idle[0].idle_since > self._idle_s:
            self._idle.popleft().close()
