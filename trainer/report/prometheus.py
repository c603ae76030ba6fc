"""Metrics served over HTTP for Prometheus: on the loopback interface, or elsewhere to those who know a token."""

from __future__ import annotations

import hmac
import ipaddress
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..errors import TrainerConfigError
from .records import Values

TOKEN_NAME = "PENSTOCK_METRICS_TOKEN"
LOOPBACK = "127.0.0.1"

_Application = Callable[[Mapping[str, Any], Callable[..., Any]], Iterable[bytes]]


class Prometheus:
    """Gauges ``penstock_<kind>_<name>`` served by a daemon thread until ``close``.

    With PENSTOCK_METRICS_TOKEN in the environment, requests have to send it as ``Authorization: Bearer``.
    """

    def __init__(self, port: int, address: str = LOOPBACK) -> None:
        """Begin to serve.

        Raises:
            TrainerConfigError: the port is taken, the package is missing, or there is no token for an address that
                others reach.
        """
        try:
            from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
        except ImportError as exc:
            raise TrainerConfigError(
                f"report.prometheus_port={port} needs the package prometheus-client; install penstock[metrics], or "
                "leave it out"
            ) from exc
        token = os.environ.get(TOKEN_NAME, "").strip()
        if not token and not is_loopback(address):
            raise TrainerConfigError(
                f"report.prometheus_address={address} is reached by others; set {TOKEN_NAME} in the environment, which "
                f"they have to send, or leave it at {LOOPBACK}"
            )
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, addr=address, registry=self._registry)
        except OSError as exc:
            raise TrainerConfigError(
                f"report.prometheus_port={port} cannot be opened on {address} ({exc.strerror}); give a free port"
            ) from exc
        if token:  # until here the registry is empty
            self._server.set_app(_with_token(make_wsgi_app(self._registry), token))

    def record(self, kind: str, step: int, values: Values) -> None:
        for name, value in {"step": step, **values}.items():
            if isinstance(value, (int, float)):
                self._gauge(f"penstock_{kind}_{name}").set(value)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _gauge(self, name: str) -> Any:
        from prometheus_client import Gauge

        clean = "".join(c if c.isalnum() else "_" for c in name)
        if clean not in self._gauges:
            self._gauges[clean] = Gauge(clean, clean.replace("_", " "), registry=self._registry)
        return self._gauges[clean]


def is_loopback(address: str) -> bool:
    """Whether only processes of this machine reach an address."""
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
