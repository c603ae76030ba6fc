"""The services of a run over TCP: one process answers, and the workers of others call it.

Each side proves that it has the run's key (an HMAC of a challenge) before anything is unpickled.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from ...storage.errors import PenstockError
from ...storage.threads.interruptible import Event, Thread
from ..errors import ShardUnreachableError, StallError
from ..server.placement import Placement
from ..server.refused import Refused, raise_refused
from ..server.services import Services
from .remote_services import RemoteServices

CALLS = frozenset(
    {"call", "begin", "leave", "lease", "consume", "renew", "report", "task", "proceed", "finish", "is_stopping"}
)
_STOP_S = 5.0
_PROOF_S = 10.0  # for a new connection to prove that it has the key
_BEAT_S = 1.0  # while the services are not there yet, callers hear so often that this process lives
_WAITING = "the services are not there yet"


def _limit_waits(connection: Connection[Any, Any], seconds: float) -> None:
    """Have reads and writes that do not move for so long raise BlockingIOError; 0: wait for ever."""
    limit = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
    with socket.socket(fileno=os.dup(connection.fileno())) as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)


class ServicesHost:
    """A port at which the services of a run can be called, once ``serve`` is entered.

    All mutable state: whether it is closed, the services once they are there, and the connections.

    Raises:
        OSError: ``host`` is no address of this machine.
    """

    def __init__(self, host: str) -> None:
        self.key = secrets.token_bytes(32)
        self._listener = Listener((host, 0), family="AF_INET", backlog=128)
        self.address: tuple[str, int] = self._listener.address
        self._is_there = Event()
        self._is_closed = False
        self._services: Any = None
        self._lock = threading.Lock()
        self._open: set[Connection[Any, Any]] = set()
        self._thread = Thread(target=self._accept, name="services")
        self._thread.start()

    @contextmanager
    def serve(self, services: Services) -> Iterator[None]:
        """Answer calls with these services; ``stop`` of them, too."""
        self._services = services
        self._is_there.set()
        yield

    def close(self) -> None:
        """End all connections."""
        self._is_closed = True
        self._is_there.set()
        with suppress(OSError):  # wakes ``accept``
            socket.create_connection(self.address, timeout=_STOP_S).close()
        self._thread.join(timeout=_STOP_S)
        self._listener.close()
        with self._lock:
            for connection in self._open:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as raw:
                    raw.shutdown(socket.SHUT_RDWR)  # wakes the thread that reads, which closes it

    def _accept(self) -> None:
        while not self._is_closed:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError):
                time.sleep(0.01)  # where there are no more descriptors, until one is free
                continue
            with self._lock:
                self._open.add(connection)
            Thread(target=self._answer, args=(connection,), name="services of a worker").start()

    def _answer(self, connection: Connection[Any, Any]) -> None:
        try:
            _limit_waits(connection, _PROOF_S)
            deliver_challenge(connection, self.key)
            answer_challenge(connection, self.key)
            _limit_waits(connection, 0)
            while not self._is_there.wait(_BEAT_S):
                connection.send(_WAITING)
            while not self._is_closed:
                name, values = connection.recv()
                connection.send(self._call(name, values))
        except (OSError, EOFError, AuthenticationError):
            pass  # it has left, or is none of ours
        finally:
            with self._lock:
                self._open.discard(connection)
            with suppress(OSError):
                connection.close()

    def _call(self, name: str, values: tuple[Any, ...]) -> Any:
        try:
            if name == "placement":
                placement = self._services.placement()
                return placement.weights, placement.elsewhere
            if name == "stop":
                return self._services.ask(lambda one, now: one.stop())
            if name not in CALLS:
                raise ShardUnreachableError(f"a run has no {name!r}")
            return getattr(self._services, name)(*values)
        except PenstockError as exc:
            return Refused.of(exc)


class TcpServices(RemoteServices):
    """``Services`` of a run at an address, for several threads, of which each has a connection of its own.

    All mutable state: the connections, and the error after which nothing is asked any more.
    """

    def __init__(self, address: tuple[str, int], key: bytes, *, patience_s: float | None = None) -> None:
        """``patience_s`` is how long an answer may take until all calls end with StallError; None: for ever."""
        self._address, self._key, self._patience_s = address, key, patience_s
        self._local = threading.local()
        self._silence: StallError | None = None

    def placement(self) -> Placement:
        return Placement(*self._ask("placement"))

    def stop(self) -> None:
        """Have all workers end after the batches that they are training on."""
        self._ask("stop")

    def _ask(self, name: str, *values: Any) -> Any:
        if self._silence is not None:
            raise self._silence
        connection: Connection[Any, Any] | None = getattr(self._local, "connection", None)
        try:
            if connection is None:
                connection = self._local.connection = self._connect()
            connection.send((name, values))
            while isinstance(found := connection.recv(), str) and found == _WAITING:
                pass
        except (OSError, EOFError, AuthenticationError) as exc:
            if connection is not None:
                connection.close()
            self._local.connection = None
            where = f"the process of rank 0 at {self._address[0]}:{self._address[1]}"
            if isinstance(exc, BlockingIOError | TimeoutError):
                self._silence = StallError(
                    f"{where} has not answered for {self._patience_s:g} s (stall_timeout_s); look whether it is "
                    "stopped, and whether its machine and the network between are up"
                )
                raise self._silence from exc
            time.sleep(0.01)
            raise ShardUnreachableError(f"{where} gave no answer: {exc!r}") from exc
        return raise_refused(found)

    def _connect(self) -> Connection[Any, Any]:
        """Open a connection on which each side has proved that it has the key."""
        with socket.create_connection(self._address, timeout=self._patience_s) as raw:
            raw.setblocking(True)
            connection: Connection[Any, Any] = Connection(raw.detach())
        try:
            _limit_waits(connection, self._patience_s or 0)
            answer_challenge(connection, self._key)
            deliver_challenge(connection, self._key)
        except BaseException:
            connection.close()
            raise
        return connection
