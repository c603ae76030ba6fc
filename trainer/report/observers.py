"""Where records go: TensorBoard, and all observers that a config asks for.

Everything here runs on rank 0 only and is told plain numbers; nothing here may take part in a collective.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..errors import TrainerConfigError, TrainerError
from .config import ReportConfig
from .console import ProgressLine
from .json_lines import JsonLines
from .prometheus import Prometheus
from .rank_status import RankStatus
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


def open_observers(
    config: ReportConfig,
    output_dir: Path,
    total_steps: int | None,
    list_ranks: Callable[[], Sequence[RankStatus]] = list,
) -> Sequence[Observer]:
    """The observers that the config asks for; called on rank 0. ``list_ranks`` tells of all ranks, from any thread."""
    observers: list[Observer] = [JsonLines(output_dir / "metrics.jsonl")]
    try:
        if config.tensorboard:
            observers.append(TensorBoard(output_dir / "tensorboard"))
        if config.prometheus_port is not None:
            address = config.prometheus_address
            observers.append(Prometheus(config.prometheus_port, address, list_ranks=list_ranks))
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
