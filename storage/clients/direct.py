"""Ranged GETs that bypass obstore: signed by it, received by the standard library into memory of ours.

obstore collects each body in fresh memory, whose page faults and copy cost more CPU time than the transfer itself. Only
what this can do exactly as obstore does is read so (`fallback_reason`): plain HTTP, with options that leave a GET as it
is.
"""

from __future__ import annotations

import http.client
import os
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from email.message import Message
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import SplitResult, quote, urlsplit
from urllib.request import getproxies, proxy_bypass

import obstore

from ..memory.buffers import BUFFERS
from ..options import seconds_of
from .connections import Connection, Connections, Times

# A presigned URL outlives its use by more than the 15 minutes that clocks may differ, and its use ends before that of
# temporary credentials, which obstore renews 5 minutes before they expire.
SIGNED_FOR = timedelta(minutes=20)
_SIGNATURE_S = 240.0
_IDLE_TOO_LONG = 408  # what some proxies write before they close a connection that was idle
_MOST_SIGNATURES = 10_000
_ERROR_BYTES = 64 << 10
# Memory for more than this is taken only when the server has announced that many bytes.
_READY_BYTES = 64 << 20
_REFUSED = frozenset({400, 401, 403})
_REDIRECTS = frozenset({301, 302, 303, 307, 308})
_CODE = re.compile(rb"<Code>([A-Za-z0-9]+)</Code>")

_PLAIN_S3 = frozenset(
    {"endpoint", "region", "access_key_id", "secret_access_key", "session_token", "virtual_hosted_style_request",
     "request_payer", "credential_provider", "role_arn", "role_session_name", "web_identity_token_file"}
)  # fmt: skip
_PLAIN_CLIENT = frozenset(
    {"allow_http", "connect_timeout", "http1_only", "pool_idle_timeout", "pool_max_idle_per_host", "read_timeout",
     "timeout", "user_agent"}
)  # fmt: skip
# obstore takes these from the environment, too.
_FOREIGN_VARIABLES = re.compile(r"(?i)AWS_(SKIP_SIGNATURE|S3_EXPRESS|SERVER_SIDE_ENCRYPTION|SSE_.*|PROXY_.*|HTTP2_.*)")


def fallback_reason(scheme: str, origin: str, config: Mapping[str, Any], client: Mapping[str, Any]) -> str | None:
    """Explain in a word or two why obstore must read a store's ranges; None if they are read directly.

    ``config`` and ``client`` are options as `penstock.storage.options` resolves them.
    """
    is_s3 = scheme in {"s3", "s3a"}
    if not is_s3 and scheme != "http":
        return scheme
    parts = urlsplit(str(config.get("endpoint", "https://")) if is_s3 else origin)
    if parts.scheme != "http" or not parts.hostname:
        return "https"
    other = sorted((config.keys() - _PLAIN_S3) | (client.keys() - _PLAIN_CLIENT))
    if is_s3:
        other += sorted(name for name in os.environ if _FOREIGN_VARIABLES.fullmatch(name))
    if other:
        return other[0]
    proxies = getproxies()
    if (proxies.get("http") or proxies.get("all")) and not proxy_bypass(parts.hostname):
        return "a proxy"
    return None


class DirectAnswer:
    """The answer to a GET of a range, before its body is received: ``meta`` and ``range`` as obstore names them."""

    range: tuple[int, int]
    meta: dict[str, Any]

    def __init__(
        self,
        connections: Connections,
        connection: Connection,
        response: http.client.HTTPResponse,
        buffer: memoryview | None,
    ) -> None:
        self._connections, self._connection, self._response = connections, connection, response
        self._buffer = buffer
        self.status = response.status

    def read_head(self, start: int, stop: int) -> None:
        """Check that the answer is what was asked for, or the part of it that the object has.

        Raises:
            OSError: it is not; with words that `penstock.storage.clients.remote_errors` knows.
        """
        response = self._response
        if self.status != 206:
            raise OSError(self._describe_refusal())
        first, last, size = parse_content_range(response.getheader("Content-Range", ""))
        if first != start or (last != stop and last != size) or response.length != last - first:
            raise OSError("the server does not support requests for ranges: its response is another one")
        self.range = (first, last)
        self.meta = describe_answer(response.headers, size)

    def bytes(self) -> memoryview:
        """The body, in memory that is used again once nothing refers to it.

        Raises:
            OSError: it did not come whole.
        """
        size = self.range[1] - self.range[0]
        body = BUFFERS.take(size) if self._buffer is None else self._buffer[:size]
        got = 0
        while got < len(body):
            read = self._response.readinto(body[got:])
            if not read:
                raise ConnectionError(f"the response ended after {got} of {len(body)} bytes")
            got += read
        return body

    def close(self) -> None:
        """Keep the connection if the body was received to its end; give it up if not."""
        if self._response.isclosed() and not self._response.will_close and self.status >= 200:
            self._connections.give_back(self._connection)
        else:
            self._response.close()
            self._connection.close()

    def _describe_refusal(self) -> str:
        """The status, and the service's code, of an answer that has no data."""
        if 200 <= self.status < 300:
            return "the server does not support requests for ranges"
        try:
            found = _CODE.search(self._response.read(_ERROR_BYTES))
        except (OSError, http.client.HTTPException):
            found = None  # the status says enough
        return f"status code: {self.status}" + (f" <Code>{found[1].decode()}</Code>" if found else "")


class DirectReads:
    """Reads ranges at one host. Mutable state: connections; signed URLs, under a lock; whether data are elsewhere."""

    def __init__(self, sign: Callable[[str], str], url: str, client: Mapping[str, Any]) -> None:
        """``sign``: the URL of an object, whose signature holds for `SIGNED_FOR`; ``url``: one of the same host."""
        self._sign = sign
        self._host = _host_of(urlsplit(url))
        self._agent = str(client["user_agent"])
        self._lock = threading.Lock()
        self._signed: OrderedDict[str, tuple[SplitResult, float]] = OrderedDict()
        self._is_elsewhere = False
        self._connections = Connections(
            *self._host, int(client["pool_max_idle_per_host"]), seconds_of(client["pool_idle_timeout"])
        )

    def get(self, path: str, options: Mapping[str, Any], times: Times) -> DirectAnswer | None:
        """``options``: obstore's ``range`` (start, stop) and ``if_match``.

        None where the data are at another host, and from the first request on that tells so: obstore goes there.

        Raises:
            OSError: with words that `penstock.storage.clients.remote_errors` knows; obstore's errors, where it cannot
                sign.
        """
        url, is_new = self._find_url(path)
        if self._is_elsewhere:
            return None
        start, stop = options["range"]
        headers = {"User-Agent": self._agent, "Range": f"bytes={start}-{stop - 1}"}
        if "if_match" in options:
            headers["If-Match"] = options["if_match"]
        until = time.monotonic() + times.total_s
        answer = self._ask(url, headers, stop - start, times, until)
        if answer.status in _REFUSED and url.query and not is_new:
            answer.close()
            self._forget(path)  # the credentials that it was signed with may be gone
            answer = self._ask(self._find_url(path)[0], headers, stop - start, times, until)
        if answer.status in _REDIRECTS:
            answer.close()
            self._is_elsewhere = True
            return None
        try:
            answer.read_head(start, stop)
        except BaseException:
            answer.close()
            raise
        return answer

    def close(self) -> None:
        """Close idle connections now, others when their reads end."""
        self._connections.close()

    def _find_url(self, path: str) -> tuple[SplitResult, bool]:
        """An object's URL, and whether it was signed just now."""
        now = time.monotonic()
        with self._lock:
            known = self._signed.get(path)
        if known is not None and now < known[1]:
            return known[0], False
        url = urlsplit(self._sign(path))
        if url.scheme != "http" or _host_of(url) != self._host:
            self._is_elsewhere = True
        with self._lock:
            self._signed[path] = (url, now + _SIGNATURE_S)
            self._signed.move_to_end(path)
            while len(self._signed) > _MOST_SIGNATURES:
                self._signed.popitem(last=False)
        return url, True

    def _forget(self, path: str) -> None:
        with self._lock:
            self._signed.pop(path, None)

    def _ask(
        self, url: SplitResult, headers: Mapping[str, str], nbytes: int, times: Times, until: float
    ) -> DirectAnswer:
        """Ask on a warm connection; on a new one where the server has closed that one meanwhile.

        Memory for the answer is got ready while that is on its way.
        """
        target = f"{url.path}?{url.query}" if url.query else url.path
        connection = self._connections.take()
        buffer: memoryview | None = None
        while True:
            try:
                connection.send_get(target, {"Host": url.netloc, **headers}, times, until)
                if buffer is None and nbytes <= _READY_BYTES:
                    buffer = BUFFERS.take(nbytes)
                response = connection.getresponse()
            except (OSError, http.client.HTTPException) as exc:
                connection.close()
                if isinstance(exc, ConnectionError) and connection.used:
                    connection = self._connections.take(fresh=True)
                    continue
                raise _translate(exc) from None
            if response.status == _IDLE_TOO_LONG and connection.used:
                response.close()
                connection.close()
                connection = self._connections.take(fresh=True)
                continue
            return DirectAnswer(self._connections, connection, response, buffer)


def _translate(exc: Exception) -> OSError:
    """In the words that `penstock.storage.clients.remote_errors` knows, and without the URL, which may be signed."""
    if isinstance(exc, BlockingIOError):
        return TimeoutError("the request could not be sent in time")
    if isinstance(exc, OSError):
        return exc
    return ConnectionError(f"the response is no HTTP ({type(exc).__name__})")


def sign_with(client: Any) -> Callable[[str], str]:
    """URLs of objects that obstore's ``client`` signs; it renews its credentials by itself."""
    return lambda path: str(obstore.sign(client, "GET", path, SIGNED_FOR))


def plain_urls(origin: str) -> Callable[[str], str]:
    """URLs of a web server, which takes no signature."""
    return lambda path: f"{origin}/{quote(path)}"


def times_of(client: Mapping[str, Any]) -> Times:
    """The limits that the options of an HTTP client set."""
    return Times(*(seconds_of(client[name]) for name in ("connect_timeout", "read_timeout", "timeout")))


def _host_of(url: SplitResult) -> tuple[str, int]:
    return url.hostname or "", url.port or 80


def parse_content_range(text: str) -> tuple[int, int, int]:
    """Start, stop (exclusive) and the object's size of ``bytes 0-9/100``."""
    unit, _, rest = text.partition(" ")
    span, _, size = rest.partition("/")
    first, _, last = span.partition("-")
    if unit != "bytes" or not (first.isdecimal() and last.isdecimal() and size.isdecimal()):
        raise OSError("the server does not support requests for ranges: its response has no valid Content-Range")
    return int(first), int(last) + 1, int(size)


def describe_answer(headers: Mapping[str, str] | Message, size: int) -> dict[str, Any]:
    """Size, ETag and time of an object by the headers of an answer, as obstore names them."""
    modified: datetime | None = None
    try:
        modified = parsedate_to_datetime(headers.get("Last-Modified", ""))
    except ValueError:
        modified = None
    return {"size": size, "e_tag": headers.get("ETag"), "last_modified": modified}
