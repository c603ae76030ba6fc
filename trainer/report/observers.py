"""What a person looks at: the progress line, JSON lines, TensorBoard, Prometheus, and where the time went.

Everything here runs on rank 0 only and is told plain numbers; nothing here may take part in a collective.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from ..errors import TrainerConfigError, TrainerError
from ..options import check_range

Values = Mapping[str, float | int | str | None]


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """What is reported, how often, and where."""

    every: int = 10
    """Steps between records; numbers in between are averaged."""

    progress_s: float = 0.5
    """Seconds between updates of the progress line; 20 times as long where there is no terminal."""

    quiet: bool = False
    """Show neither the progress line nor the closing table."""

    tensorboard: bool = False
    """Also write TensorBoard events to output_dir/tensorboard."""

    prometheus_port: int | None = None
    """Also serve Prometheus metrics on this port of rank 0's node."""

    def __post_init__(self) -> None:
        check_range("report.every", self.every, low=1)
        check_range("report.progress_s", self.progress_s, low=0.0)
        check_range("report.prometheus_port", self.prometheus_port, low=1, high=65535)


class Observer(Protocol):
    """Receives what happened. The training loop calls it on rank 0; it must not wait for other ranks.

    One that raises is closed and left out for the rest of the run, which the others are told in a note.
    """

    def record(self, kind: str, step: int, values: Values) -> None:
        """Record ``values`` at ``step``; ``kind`` is "train", "evaluate", "checkpoint", "rewind", "note" or "end".

        After a rewind ``step`` is an earlier one.
        """
        ...

    def close(self) -> None:
        """Flush and release what is held; called once."""
        ...


class JsonLines:
    """One JSON object per line, appended to a file and flushed at each record; NaN and infinity become null."""

    def __init__(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", encoding="utf-8", buffering=1)
        except OSError as exc:
            raise TrainerError(
                f"output_dir={str(path.parent)!r} cannot be written ({exc.strerror}); give a folder that can"
            ) from exc

    def record(self, kind: str, step: int, values: Values) -> None:
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, "time": round(time.time(), 3), **plain}) + "\n")

    def close(self) -> None:
        self._file.close()


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


class ProgressLine:
    """The newest numbers on one line, overwritten on a terminal; elsewhere each time on a new line."""

    def __init__(self, *, every_s: float, total_steps: int | None, stream: TextIO | None = None) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._on_terminal = self._stream.isatty()
        self._every_s = every_s if self._on_terminal else 20 * every_s
        self._total = total_steps
        self._next = 0.0
        self._width = 0

    def record(self, kind: str, step: int, values: Values) -> None:
        if kind == "train":
            if time.monotonic() < self._next:
                return
            self._next = time.monotonic() + self._every_s
            self._write(format_progress(step, self._total, values), over=self._on_terminal)
        else:
            text = "  ".join(f"{name} {_short(value)}" for name, value in values.items())
            self._write(f"step {step}  {kind}: {text}", over=False)

    def close(self) -> None:
        if self._width:
            self._stream.write("\n")
        self._stream.flush()

    def _write(self, text: str, *, over: bool) -> None:
        padded = text.ljust(self._width)
        self._stream.write(f"\r{padded}" if over else f"{chr(13) if self._width else ''}{padded}\n")
        self._stream.flush()
        self._width = len(text) if over else 0


def format_progress(step: int, total_steps: int | None, values: Values) -> str:
    """The progress line: step, epoch, loss, rate, samples/s, the share of time spent waiting for data, time left."""
    of = f"/{total_steps}" if total_steps else ""
    parts = [f"step {step}{of}", f"epoch {values.get('epoch')}", f"loss {_short(values.get('loss'))}"]
    parts += [f"rate {_short(values.get('rate'))}", f"{_short(values.get('samples_per_s'))} samples/s"]
    wait = values.get("data_wait_share")
    if isinstance(wait, (int, float)):
        parts.append(f"data wait {wait:.0%}")
    eta = values.get("eta_s")
    if isinstance(eta, (int, float)):
        parts.append(f"ETA {int(eta) // 3600}:{int(eta) // 60 % 60:02d}:{int(eta) % 60:02d}")
    return "  ".join(parts)


def format_times(seconds: Mapping[str, float], total_s: float) -> str:
    """A table of phases, longest first; what no phase covers is "other"."""
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    rows.append(("other", max(0.0, total_s - sum(seconds.values()))))
    lines = ["where the time went (rank 0)", f"{'phase':<12}{'seconds':>10}{'share':>8}"]
    lines += [f"{name:<12}{spent:>10.2f}{spent / max(total_s, 1e-9):>8.1%}" for name, spent in rows]
    lines.append(f"{'all':<12}{total_s:>10.2f}{1:>8.1%}")
    return "\n".join(lines)


def open_observers(config: ReportConfig, output_dir: Path, total_steps: int | None) -> Sequence[Observer]:
    """The observers that the config asks for; called on rank 0."""
    observers: list[Observer] = [JsonLines(output_dir / "metrics.jsonl")]
    try:
        if config.tensorboard:
            observers.append(TensorBoard(output_dir / "tensorboard"))
        if config.prometheus_port is not None:
            observers.append(Prometheus(config.prometheus_port))
    except TrainerError:
        for observer in observers:
            observer.close()
        raise
    if not config.quiet:
        observers.append(ProgressLine(every_s=config.progress_s, total_steps=total_steps))
    return observers


def _short(value: float | int | str | None) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
