"""Requests to one web server that carry the user's headers, to that server alone; and the pages of its index.

obstore follows redirects by itself and takes custom headers along to any host. Here every redirect is followed by hand.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.error import URLError
from urllib.parse import quote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import urllib3
from urllib3 import exceptions as foreign

from ..errors import UnsupportedURLError
from ..options import is_true, seconds_of
from .direct import describe_answer, parse_content_range

MAX_REDIRECTS = 5
MAX_PAGE_BYTES = 64 << 20
_PIECE_BYTES = 1 << 20


class WebAnswer:
    """The answer to a GET, before its body is read: ``meta`` and ``range`` as obstore names them."""

    def __init__(self, response: urllib3.BaseHTTPResponse, byte_range: tuple[int, int] | None, until: float) -> None:
        """``until``: the time (monotonic) at which the body has to be there."""
        self._response = response
        self._until = until
        length = int(response.headers.get("Content-Length", -1))
        if byte_range is None:
            start, stop, size = 0, length, length
        else:
            start, stop, size = parse_content_range(response.headers.get("Content-Range", ""))
        if length != stop - start:
            response.close()
            raise OSError("the server does not support requests like this: the length of its response is not given")
        self.range = (start, stop)
        self.meta = describe_answer(response.headers, size)

    def bytes(self) -> bytearray:
        """The body, as long as it came."""
        wanted = self.range[1] - self.range[0]
        with _translated():
            return _read(self._response, wanted, self._until)

    def close(self) -> None:
        """Give up what was not read."""
        self._response.close()


class WebClient:
    """GET, HEAD, PUT, DELETE below one origin, as obstore has them. The only state is the pool of connections."""

    def __init__(self, origin: str, client: Mapping[str, Any]) -> None:
        """``client``: obstore's options of an HTTP client, as `penstock.storage.options` settles them."""
        self._origin = origin
        self._headers = {name: _as_text(value) for name, value in client.get("default_headers", {}).items()}
        self._agent = {"User-Agent": str(client["user_agent"]), "Accept-Encoding": "identity"}
        self._total_s = seconds_of(client["timeout"])
        self._times = urllib3.Timeout(
            connect=seconds_of(client["connect_timeout"]), read=seconds_of(client["read_timeout"])
        )
        self._pool = _open_pool(origin, client)
        self._allow_http = is_true(client.get("allow_http", False))

    def get(self, path: str, *, options: Mapping[str, Any]) -> WebAnswer:
        """``options``: obstore's ``range`` (start, stop) and ``if_match``."""
        headers = {}
        byte_range: tuple[int, int] | None = options.get("range")
        if byte_range is not None:
            headers["Range"] = f"bytes={byte_range[0]}-{byte_range[1] - 1}"
        if "if_match" in options:
            headers["If-Match"] = options["if_match"]
        until = time.monotonic() + self._total_s
        response = self._ask("GET", path, headers)
        if byte_range is not None and response.status != 206:
            response.close()
            raise OSError("the server does not support requests for ranges")
        return WebAnswer(response, byte_range, until)

    def head(self, path: str) -> dict[str, Any]:
        """Size, ETag and time of an object."""
        response = self._ask("HEAD", path, {})
        response.release_conn()
        if "Content-Length" not in response.headers:
            raise OSError("the server does not support requests like this: the length of its response is not given")
        return describe_answer(response.headers, int(response.headers["Content-Length"]))

    def put(self, path: str, data: memoryview) -> dict[str, Any]:
        """Write an object; returns its ETag if the server tells it."""
        response = self._ask("PUT", path, {}, body=bytes(data))
        response.close()
        return {"e_tag": response.headers.get("ETag")}

    def delete(self, paths: Sequence[str]) -> None:
        """Delete objects, one after another."""
        for path in paths:
            self._ask("DELETE", path, {}).close()

    def read_page(self, path: str) -> bytes:
        """The page of a folder's index; refused where it has no end in sight."""
        return self.read_url(f"{self._origin}/{quote(path)}")

    def read_url(self, url: str) -> bytes:
        """The page at a URL of this origin; refused where it has no end in sight."""
        until = time.monotonic() + self._total_s
        response = self._ask_url("GET", url, {})
        with _translated():
            page = _read(response, MAX_PAGE_BYTES + 1, until)
        if len(page) > MAX_PAGE_BYTES:
            response.close()
            raise UnsupportedURLError(
                f"{url.partition('?')[0]}: the index page is longer than {MAX_PAGE_BYTES >> 20} MiB; "
                "name the shards with a brace pattern like shard-{000..099}.tar, or give a list of URLs"
            )
        return bytes(page)

    def close(self) -> None:
        """Close idle connections."""
        self._pool.clear()

    def _ask(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> urllib3.BaseHTTPResponse:
        return self._ask_url(method, f"{self._origin}/{quote(path)}", headers, body)

    def _ask_url(
        self, method: str, url: str, headers: Mapping[str, str], body: bytes | None = None
    ) -> urllib3.BaseHTTPResponse:
        own = self._headers
        for _ in range(MAX_REDIRECTS + 1):
            with _translated():
                response = self._pool.request(
                    method, url, headers={**own, **self._agent, **headers}, body=body, timeout=self._times,
                    redirect=False, retries=False, preload_content=False, decode_content=False,
                )  # fmt: skip
            target = response.get_redirect_location()
            if not target:
                if response.status >= 400 or response.status < 200:
                    response.close()
                    raise OSError(f"status code: {response.status}")
                return response
            response.close()
            url = urljoin(url, target)
            if not is_same_origin(url, self._origin):
                own = {}  # for good: a host that redirects back may not choose what is asked with them
                self._check_target(method, url)
        raise OSError(f"the server does not support this: it redirects more than {MAX_REDIRECTS} times")

    def _check_target(self, method: str, url: str) -> None:
        scheme, host = urlsplit(url).scheme, urlsplit(url).hostname
        if (
            method in {"PUT", "DELETE"}
            or scheme not in {"http", "https"}
            or (scheme == "http" and not self._allow_http)
        ):
            raise UnsupportedURLError(
                f"{self._origin} redirects a {method} to {scheme}://{host}, which is not followed; "
                "give the URL of that host, if you trust it with the data"
            )


def is_same_origin(url: str, origin: str) -> bool:
    """Return whether scheme, host and port are the same."""
    return _origin_of(url) == _origin_of(origin)


def _origin_of(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _open_pool(origin: str, client: Mapping[str, Any]) -> urllib3.PoolManager:
    options: dict[str, Any] = {"maxsize": int(client["pool_max_idle_per_host"]), "ssl_context": _trust(client)}
    if is_true(client.get("allow_invalid_certificates", False)):
        options |= {"cert_reqs": "CERT_NONE", "assert_hostname": False}
    proxy, excluded = client.get("proxy_url"), str(client.get("proxy_excludes", ""))
    parts = urlsplit(origin)
    host = parts.hostname or ""
    if proxy is None and not proxy_bypass(host):
        proxies = getproxies()
        proxy = proxies.get(parts.scheme) or proxies.get("all")
    elif any(host == name or host.endswith("." + name.lstrip(".")) for name in excluded.split(",") if name):
        proxy = None
    if proxy:
        return urllib3.ProxyManager(str(proxy), proxy_ssl_context=_trust(client, "proxy_ca_certificate"), **options)
    return urllib3.PoolManager(**options)


def _trust(client: Mapping[str, Any], option: str = "root_certificate") -> ssl.SSLContext:
    context = ssl.create_default_context()
    if client.get(option):
        try:
            context.load_verify_locations(cadata=_as_text(client[option]))
        except ssl.SSLError as exc:
            raise UnsupportedURLError(f"storage_options: {option} is no certificate in PEM ({exc})") from exc
    if option == "root_certificate" and is_true(client.get("allow_invalid_certificates", False)):
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _read(response: urllib3.BaseHTTPResponse, wanted: int, until: float) -> bytearray:
    """Up to ``wanted`` bytes of a body, within its time."""
    body = bytearray()
    read: Callable[[int], bytes] = response.read1
    while len(body) < wanted:
        piece = read(min(_PIECE_BYTES, wanted - len(body)))
        if not piece:
            break
        body += piece
        if time.monotonic() > until:
            response.close()
            raise TimeoutError("the response was too slow")
    response.release_conn()
    return body


@contextmanager
def _translated() -> Iterator[None]:
    """Turn urllib3's errors into Python's own, which the Translator of a store knows."""
    try:
        yield
    except (foreign.NewConnectionError, foreign.ConnectTimeoutError, foreign.ProxyError, foreign.SSLError) as exc:
        raise URLError(OSError(str(exc))) from exc
    except foreign.TimeoutError as exc:
        raise TimeoutError(str(exc)) from exc
    except foreign.HTTPError as exc:
        raise ConnectionError(str(exc)) from exc


def _as_text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)
