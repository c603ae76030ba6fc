"""A run for Prometheus: the newest records of rank 0, and every rank as its status tells it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import get_args

from ...storage.observability.metrics_server import LOOPBACK, MetricsServer, Number, OpenToOthersError, metric_name
from ..errors import TrainerConfigError
from .records import Values, spell
from .status.rank_status import RankStatus, State


class Prometheus:
    """Serves ``penstock_<kind>_<name>`` of the newest records; of each rank ``penstock_rank_*``, ``penstock_loader_*``.

    ``url`` says where. Mutable state: the newest values by kind, replaced as a whole.
    """

    def __init__(
        self, port: int, address: str = LOOPBACK, *, list_ranks: Callable[[], Sequence[RankStatus]] = list
    ) -> None:
        """Begin to serve.

        Raises:
            TrainerConfigError: the port is taken, the package is missing, or there is no token for an address that
                others reach.
        """
        self._list_ranks = list_ranks
        self._values: dict[str, dict[str, float]] = {}
        try:
            self._server = MetricsServer(self._read, address=address, port=port)
        except ImportError as exc:
            raise TrainerConfigError(
                f"report.prometheus_port={port} needs the package prometheus-client; install penstock[metrics], or "
                "leave it out"
            ) from exc
        except OpenToOthersError as exc:
            raise TrainerConfigError(f"report.prometheus_address={address} {exc}") from exc
        except OSError as exc:
            raise TrainerConfigError(
                f"report.prometheus_port={port} cannot be opened on report.prometheus_address={address} "
                f"({exc.strerror or exc}); give a free port"
            ) from exc

    @property
    def url(self) -> str:
        return self._server.url

    def record(self, kind: str, step: int, values: Values) -> None:
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, (int, float))}
        found = spell({"step": float(step), **numbers}, lambda name: _allowed(f"penstock_{kind}_{name}"))
        self._values = {**self._values, kind: found}

    def close(self) -> None:
        self._server.close()

    def _read(self) -> Iterator[Number]:
        for newest in self._values.values():
            for name, value in newest.items():
                yield Number(name=name, value=value)
        for status in self._list_ranks():
            yield from list_rank_numbers(status)


def _allowed(name: str) -> str:
    """The name with what Prometheus does not allow in one replaced."""
    return "".join(c if c.isascii() and c.isalnum() else "_" for c in name)


def list_rank_numbers(status: RankStatus) -> Iterator[Number]:
    """One rank's numbers, labelled with rank and host; its loader's are named as ``serve_metrics`` does."""
    labels = {"rank": str(status.rank), "host": status.host}

    def number(name: str, value: float, help_text: str, *, is_total: bool = False) -> Number:
        return Number(name=f"penstock_rank_{name}", value=value, help=help_text, is_total=is_total, labels=labels)

    yield number("step", status.step, "steps done")
    yield number("updated_timestamp_seconds", status.time, "when the rank last told of itself")
    yield number("phase_seconds", status.phase_s, "for how long it has been in its phase")
    yield number("steps_per_second", status.steps_per_s, "steps per second, of the last seconds")
    if status.samples_per_s is not None:
        yield number("samples_per_second", status.samples_per_s, "samples of this rank per second")
    for name, seconds in status.seconds.items():
        share = seconds / status.window_s if status.window_s > 0 else 0.0
        more = {**labels, "phase": name}
        yield Number(name="penstock_rank_phase_share", value=share, help="share of the time in a phase", labels=more)
    for state in get_args(State):
        more = {**labels, "state": state}
        yield Number(
            name="penstock_rank_state", value=float(status.state == state), help="1 for the state it is in", labels=more
        )
    for values in (status.memory, status.traffic, {f"gpu_{name}": value for name, value in status.gpu.items()}):
        for name, value in values.items():
            yield Number(name=metric_name("penstock_rank", name), value=value, labels=labels)
    levels = set(status.loader_levels)
    for name, value in status.loader.items():
        if isinstance(value, (int, float)):
            full = metric_name("penstock_loader", name)
            yield Number(name=full, value=value, is_total=name not in levels, labels=labels)
    for source, progress in status.sources.items():
        for name, value in progress.items():
            more = {**labels, "source": source}
            yield Number(name=f"penstock_loader_source_{name}", value=value, help=f"{name} of a source", labels=more)
    if status.bottleneck:
        stage = {**labels, "stage": status.bottleneck}
        yield Number(name="penstock_loader_bottleneck", value=1, help="the stage that limits the loader", labels=stage)
