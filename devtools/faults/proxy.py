"""An HTTP proxy in front of one server, which spoils chosen answers, for tests.

It listens on 127.0.0.1 and hands every request on unchanged, but for the header ``Connection``; signatures of S3 stay
valid, because they sign the address that the client speaks to.
"""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import threading
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from urllib.parse import urlsplit

from .faults import Answer, BlackHole, Corrupt, Delay, Drip, Fault, Reset, Silence, Truncate

PIECE_BYTES = 1 << 16
DRIP_S = 0.1
_HEAD_BYTES = 1 << 16
_RST = struct.pack("ii", 1, 0)  # SO_LINGER with no time: closing resets


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it passed: method, path with query, headers (names in lower case)."""

    method: str
    path: str
    headers: dict[str, str]


Chooser = Callable[[Request], Fault | None]


class FaultProxy:
    """A proxy with an address of its own, run by one thread.

    Mutable state, under a lock: the faults that wait, the chooser, the requests seen.
    """

    def __init__(self, upstream: str) -> None:
        """``upstream``: the URL of the server, ``http://host:port``. Starts at once; a context manager."""
        parts = urlsplit(upstream)
        if parts.scheme != "http" or parts.hostname is None:
            raise ValueError(f"FaultProxy({upstream!r}): needs http://host:port")
        self._upstream = (parts.hostname, parts.port or 80)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[str, Fault]] = deque()
        self._chooser: Chooser | None = None
        self._requests: list[Request] = []
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._port = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="penstock-fault-proxy", daemon=True)
        self._thread.start()
        self.resume()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def requests(self) -> list[Request]:
        """Every request so far, in order of arrival."""
        with self._lock:
            return list(self._requests)

    def inject(self, fault: Fault, *, times: int = 1, path: str = "") -> None:
        """Spoil the next ``times`` answers whose path contains ``path``, after those already waiting."""
        with self._lock:
            self._waiting.extend([(path, fault)] * times)

    def choose(self, chooser: Chooser | None) -> None:
        """Ask ``chooser`` for the fault of each request for which none waits; None ends that."""
        with self._lock:
            self._chooser = chooser

    def spoil(self, fault: Fault, share: float, *, seed: int = 0) -> None:
        """Spoil a random share of all answers to GETs, drawn from ``seed`` in order of arrival."""
        draw = random.Random(seed)
        self.choose(lambda request: fault if request.method == "GET" and draw.random() < share else None)

    def pause(self) -> None:
        """Refuse new connections and reset those that are open, as a server that is gone."""
        self._call(self._stop())

    def resume(self) -> None:
        """Listen again, on the same port."""
        self._call(self._listen())

    def close(self) -> None:
        """Reset all connections and end the thread; further calls do nothing."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[None, None, None]) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(30)

    async def _listen(self) -> None:
        if self._server is None:
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", self._port, limit=_HEAD_BYTES)
            self._port = self._server.sockets[0].getsockname()[1]

    async def _stop(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for _ in range(3):  # closed transports release their sockets in a later round of the loop
            await asyncio.sleep(0)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._serve_one(reader, writer):
                pass
        except (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError):
            _reset(writer)
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """Answer one request; returns whether the connection can take another."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return False
        request, length = _parse_request(head)
        if request.headers.get("expect", "").lower() == "100-continue":
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = await reader.readexactly(length)
        fault = self._take(request)
        if isinstance(fault, BlackHole):
            await reader.read()  # until the client gives up
            return False
        if isinstance(fault, Answer):
            return await _answer(writer, fault, with_body=request.method != "HEAD")
        if isinstance(fault, Delay):
            await asyncio.sleep(fault.seconds)
        return await self._relay(request, head, body, _Spoiled(reader, writer, fault))

    def _take(self, request: Request) -> Fault | None:
        with self._lock:
            self._requests.append(request)
            for i, (path, fault) in enumerate(self._waiting):
                if path in request.path:
                    del self._waiting[i]
                    return fault
            return self._chooser(request) if self._chooser is not None else None

    async def _relay(self, request: Request, head: bytes, body: bytes, client: _Spoiled) -> bool:
        upstream, out = await asyncio.open_connection(*self._upstream, limit=_HEAD_BYTES)
        try:
            out.write(_without(head, b"connection", b"expect") + b"Connection: close\r\n\r\n" + body)
            answer = await upstream.readuntil(b"\r\n\r\n")
            status, headers = _parse_answer(answer)
            if request.method == "HEAD" or status in {204, 304}:
                length: int | None = 0
            else:
                length = int(headers["content-length"]) if "content-length" in headers else None
            close = b"" if length is not None else b"Connection: close\r\n"
            await client.write_head(_without(answer, b"connection") + close + b"\r\n")
            left = length
            while not client.is_over and left != 0:
                piece = await upstream.read(PIECE_BYTES)
                if not piece:
                    break
                left = None if left is None else left - len(piece)
                await client.write(piece)
            return left == 0 and not client.is_over
        finally:
            out.close()


class _Spoiled:
    """The client's side of one answer: writes what the fault leaves of it. Mutable state: the bytes written."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, fault: Fault | None) -> None:
        self._reader = reader
        self._writer = writer
        self._fault = fault
        self._written = 0
        self.is_over = False

    async def write_head(self, head: bytes) -> None:
        self._writer.write(head)
        await self._writer.drain()

    async def write(self, piece: bytes) -> None:
        if self._fault is None or isinstance(self._fault, Delay):
            await self._send(piece)
            return
        clean = piece[: max(0, self._fault.after_bytes - self._written)]
        if clean:
            await self._send(clean)
        if rest := piece[len(clean) :]:
            await self._spoil(self._fault, rest)

    async def _send(self, piece: bytes) -> None:
        self._writer.write(piece)
        self._written += len(piece)
        await self._writer.drain()

    async def _spoil(self, fault: Fault, rest: bytes) -> None:
        if isinstance(fault, Corrupt):
            await self._send(bytes(byte ^ 0x5A for byte in rest))
        elif isinstance(fault, Drip):
            step = max(1, int(fault.bytes_per_s * DRIP_S))
            for start in range(0, len(rest), step):
                await self._send(rest[start : start + step])
                await asyncio.sleep(step / fault.bytes_per_s)
        elif isinstance(fault, Silence):
            await self._reader.read()
            raise EOFError("the client gave up")
        elif isinstance(fault, Reset):
            raise ConnectionResetError("as the fault demands")
        elif isinstance(fault, Truncate):
            self.is_over = True
        else:
            raise TypeError(f"{fault} spoils no body")


async def _answer(writer: asyncio.StreamWriter, fault: Answer, *, with_body: bool) -> bool:
    lines = [f"HTTP/1.1 {fault.status} Fault", *(f"{name}: {value}" for name, value in fault.headers)]
    lines.append(f"Content-Length: {len(fault.body)}")
    writer.write("\r\n".join(lines).encode() + b"\r\n\r\n" + (fault.body if with_body else b""))
    await writer.drain()
    return True


def _parse_request(head: bytes) -> tuple[Request, int]:
    first, headers = _parse(head)
    method, path, _ = first.split(" ", 2)
    return Request(method, path, headers), int(headers.get("content-length", 0))


def _parse_answer(head: bytes) -> tuple[int, dict[str, str]]:
    first, headers = _parse(head)
    return int(first.split(" ", 2)[1]), headers


def _parse(head: bytes) -> tuple[str, dict[str, str]]:
    first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
    pairs = (line.partition(":") for line in lines)
    return first, {name.strip().lower(): value.strip() for name, _, value in pairs}


def _without(head: bytes, *names: bytes) -> bytes:
    """A head without some of its lines and without its end."""
    lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines if line.partition(b":")[0].strip().lower() not in names]
    return b"\r\n".join(kept) + b"\r\n"


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, RuntimeError):
        raw = writer.get_extra_info("socket")
        if raw is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        writer.transport.abort()
