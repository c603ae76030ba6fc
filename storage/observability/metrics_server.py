"""Numbers served to Prometheus, read anew for each request: to this machine, or to those who know a token."""

from __future__ import annotations

import hmac
import ipaddress
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..errors import PenstockError

TOKEN_NAME = "PENSTOCK_METRICS_TOKEN"
LOOPBACK = "127.0.0.1"

_Application = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]


class OpenToOthersError(PenstockError):
    """Raised where metrics would be served to other machines without a token."""


@dataclass(frozen=True, kw_only=True)
class Number:
    """One number: a running total, or a value of now. ``name`` follows Prometheus, ``_total`` left out."""

    name: str
    value: float
    help: str = ""
    is_total: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)


def metric_name(prefix: str, name: str) -> str:
    """A field's name as one of Prometheus: ``fetch_s`` is ``<prefix>_fetch_seconds``."""
    full = f"{prefix}_{name.removesuffix('_s')}_seconds" if name.endswith("_s") else f"{prefix}_{name}"
    full = full.replace("_per_seconds", "_per_second")
    return "".join(c if c.isascii() and (c.isalnum() or c == "_") else "_" for c in full)


class MetricsServer:
    """Serves ``read()`` at ``url`` until ``close``. Threads of its own call ``read``, so it must be safe from any.

    With PENSTOCK_METRICS_TOKEN in the environment, requests have to send it as ``Authorization: Bearer``.

    Raises:
        ImportError: prometheus-client is not installed.
        OSError: the port is taken, or the address is not this machine's.
        OpenToOthersError: others reach the address, and there is no token.
    """

    def __init__(self, read: Callable[[], Iterable[Number]], *, address: str = LOOPBACK, port: int = 0) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server

        token = os.environ.get(TOKEN_NAME, "").strip()
        if not token and not is_loopback(address):
            raise OpenToOthersError(
                f"is reached by others; set {TOKEN_NAME} in the environment, which they have to send, or leave it at "
                f"{LOOPBACK}"
            )
        registry = CollectorRegistry()
        self._server, self._thread = start_http_server(port, addr=address, registry=registry)
        if token:  # until here the registry is empty
            self._server.set_app(_with_token(make_wsgi_app(registry), token))
        registry.register(_Collector(read))
        self.address = address
        self.port = int(self._server.server_port)
        self._is_closed = False
        _SERVERS.add(self)

    @property
    def url(self) -> str:
        """Address of the metrics, as ``http://127.0.0.1:9100/metrics``."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}/metrics"

    def close(self) -> None:
        """Stop serving; closing twice is allowed."""
        if not self._is_closed:
            self._is_closed = True
            self._server.shutdown()
            self._server.server_close()
            self._thread.join()

    def _forget_in_child(self) -> None:
        """Close the socket in a forked child: no thread answers there, and the copy would keep the port taken."""
        self._is_closed = True
        self._server.socket.close()

    def __repr__(self) -> str:
        return f"MetricsServer({self.url!r})"


_SERVERS: weakref.WeakSet[MetricsServer] = weakref.WeakSet()


def _forget_in_child() -> None:
    for server in list(_SERVERS):
        server._forget_in_child()


os.register_at_fork(after_in_child=_forget_in_child)


def is_loopback(address: str) -> bool:
    """Return whether only processes of this machine reach an address."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _with_token(application: Any, token: str) -> _Application:
    wanted = f"Bearer {token}".encode()

    def answer(request: Mapping[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        given = str(request.get("HTTP_AUTHORIZATION", "")).encode("latin-1", "replace")
        if hmac.compare_digest(given, wanted):
            found: Iterable[bytes] = application(request, start)
            return found
        start("401 Unauthorized", [("WWW-Authenticate", "Bearer"), ("Content-Length", "0")])
        return []

    return answer


class _Collector:
    """Collector for prometheus-client: at each request it groups numbers of one name into a family."""

    def __init__(self, read: Callable[[], Iterable[Number]]) -> None:
        self._read = read

    def describe(self) -> Iterator[Any]:
        """Nothing is known before the first request."""
        return iter(())

    def collect(self) -> Iterator[Any]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        families: dict[str, Any] = {}
        for number in self._read():
            family = families.get(number.name)
            if family is None:
                kind = CounterMetricFamily if number.is_total else GaugeMetricFamily
                help_text = number.help or number.name.replace("_", " ")
                family = families[number.name] = kind(number.name, help_text, labels=list(number.labels))
            family.add_metric(list(number.labels.values()), number.value)
        return iter(families.values())
