"""A loader's metrics for Prometheus, without a trainer."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any, Protocol
from weakref import ref

from ..storage.observability.metrics_server import LOOPBACK, MetricsServer, Number, OpenToOthersError, metric_name
from .errors import ConfigError
from .metrics import LoaderMetrics, MixtureMetrics

PREFIX = "penstock_loader"
_LEVELS = MixtureMetrics.levels


class _Serveable(Protocol):
    """Served object: a loader."""

    @property
    def rank(self) -> int: ...

    def metrics(self) -> LoaderMetrics: ...

    def close_too(self, owned: Any) -> None: ...


def serve_metrics(loader: _Serveable, *, port: int = 0, address: str = LOOPBACK) -> MetricsServer:
    """Serve ``loader.metrics()`` to Prometheus at ``http://address:port/metrics``, until the loader is closed.

    Each request reads the metrics anew. Port 0 takes a free one; the result's ``url`` and ``port`` say which. Only this
    machine reaches 127.0.0.1; where others reach the address, requests have to send the token that
    PENSTOCK_METRICS_TOKEN holds.

    Raises:
        ConfigError: the port is taken or cannot be opened, the package prometheus-client is missing, or there is no
            token for an address that others reach.
        LoaderClosedError: the loader is closed.
    """
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port <= 65535:
        raise ConfigError(f"port={port!r} is no port; give one from 1 to 65535, or 0 for any that is free")
    loader.metrics()  # in a forked child this raises
    watched, labels = ref(loader), {"rank": str(loader.rank)}

    def read() -> Iterator[Number]:
        found = watched()
        return iter(()) if found is None else list_numbers(found.metrics().to_dict(), labels)

    try:
        server = MetricsServer(read, address=address, port=port)
    except ImportError as exc:
        raise ConfigError("serve_metrics() needs the package prometheus-client; install penstock[metrics]") from exc
    except OpenToOthersError as exc:
        raise ConfigError(f"address={address!r} {exc}") from exc
    except OSError as exc:
        raise ConfigError(
            f"address={address!r}, port={port} cannot be served ({exc.strerror or exc}); give a free port, or "
            "port=0 for any that is free"
        ) from exc
    try:
        loader.close_too(server)
    except BaseException:
        server.close()
        raise
    return server


def list_numbers(metrics: Mapping[str, Any], labels: Mapping[str, str]) -> Iterator[Number]:
    """The metrics of one rank as Prometheus' numbers; the bottleneck is a 1 with the stage as a label.

    Free text is left out.
    """
    for name, value in metrics.items():
        if name == "tuning":
            continue
        if isinstance(value, str):
            stage = {**labels, "stage": value}
            yield Number(name=f"{PREFIX}_{name}", value=1, help=_HELP.get(name, ""), labels=stage)
        elif isinstance(value, Mapping):
            yield from list_sources(value, labels)
        else:
            yield Number(
                name=metric_name(PREFIX, name),
                value=value,
                help=_HELP.get(name, ""),
                is_total=name not in _LEVELS,
                labels=labels,
            )


def list_sources(sources: Mapping[str, Mapping[str, Any]], labels: Mapping[str, str]) -> Iterator[Number]:
    """List a mixture's progress in each source, which is a label."""
    for source, progress in sources.items():
        for name, value in progress.items():
            if value is not None:
                full = f"{PREFIX}_source_{name}"
                yield Number(name=full, value=value, help=f"{name} of a source", labels={**labels, "source": source})


# The metrics' own documentation, which a test keeps complete.
_HELP: Mapping[str, str] = {
    name: " ".join(text.split())
    for name, text in re.findall(
        r"^ {4}(\w+): (.+?)(?=\n {0,4}\S|\Z)",
        # Python strips docstrings of their indentation from 3.13 on.
        "\n".join(inspect.cleandoc(kind.__doc__ or "") for kind in (LoaderMetrics, MixtureMetrics)),
        re.MULTILINE | re.DOTALL,
    )
}
