"""Where records go: TensorBoard, Prometheus, and all observers that a config asks for.

Everything here runs on rank 0 only and is told plain numbers; nothing here may take part in a collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import TrainerConfigError, TrainerError
from .config import ReportConfig
from .console import ProgressLine
from .json_lines import JsonLines
from .records import Observer, Values
from .trackers import InBackground, MLflow, WandB


class TensorBoard:
    """Scalars as TensorBoard events."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as exc:
            raise TrainerConfigError(
                "report.tensorboard=True needs the package tensorboard; install penstock[metrics], or leave it out"
            ) from exc
        self._writer: Any = SummaryWriter(log_dir=str(folder))

    def record(self, kind: str, step: int, values: Values) -> None:
        for name, value in values.items():
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                self._writer.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._writer.close()


class Prometheus:
    """Gauges ``penstock_<kind>_<name>`` served over HTTP by a daemon thread until ``close``."""

    def __init__(self, port: int) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError as exc:
            raise TrainerConfigError(
                f"report.prometheus_port={port} needs the package prometheus-client; install penstock[metrics], or "
                "leave it out"
            ) from exc
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = start_http_server(port, registry=self._registry)
        except OSError as exc:
            raise TrainerConfigError(
                f"report.prometheus_port={port} cannot be opened ({exc.strerror}); give a free port"
            ) from exc

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


def open_observers(config: ReportConfig, output_dir: Path, total_steps: int | None) -> Sequence[Observer]:
    """The observers that the config asks for; called on rank 0."""
    observers: list[Observer] = [JsonLines(output_dir / "metrics.jsonl")]
    try:
        if config.tensorboard:
            observers.append(TensorBoard(output_dir / "tensorboard"))
        if config.prometheus_port is not None:
            observers.append(Prometheus(config.prometheus_port))
        if config.wandb is not None:
            observers.append(WandB(config.wandb, output_dir))
        if config.mlflow is not None:
            observers.append(InBackground(MLflow(config.mlflow, output_dir)))
    except TrainerError:
        for observer in observers:
            observer.close()
        raise
    if not config.quiet:
        observers.append(ProgressLine(every_s=config.progress_s, total_steps=total_steps))
    return observers
